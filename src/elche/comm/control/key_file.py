"""Secrets of a run: key length, and the check for private files."""

from __future__ import annotations

import os
from typing import Final

KEY_BYTES: Final = 32
"""Length of a run's key."""


def is_private(descriptor: int) -> bool:
    """True if an open file belongs to this user and only this user can access it."""
    status = os.fstat(descriptor)
    return status.st_uid == os.getuid() and not status.st_mode & 0o077
