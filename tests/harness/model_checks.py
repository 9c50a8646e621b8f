"""Checks as a rank reports them, of a model that is any value."""

from __future__ import annotations

import zlib

from elche.coordination.accounts.model_checks import ModelCheck
from elche.coordination.protocol.messages import CheckRows


def checks_of(model: object, at: int = 0, kind: str = "CPU") -> CheckRows:
    bits = zlib.crc32(repr(model).encode())
    return (ModelCheck(at, "w", kind, bits, 1, 1e-7, 1.0, 1.0),)
