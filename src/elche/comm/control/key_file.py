"""Secrets of a run: their length, and files that one user alone reads."""

from __future__ import annotations

import os
from typing import Final

KEY_BYTES: Final = 32
"""Length of a run's key."""


def is_private(descriptor: int) -> bool:
    """True if an open file is this user's, and nobody else's to read or write."""
    status = os.fstat(descriptor)
    return status.st_uid == os.getuid() and not status.st_mode & 0o077
