"""Disks on which something goes wrong: what `elche.checkpoint.files` has for ``os``."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any


class QuickOs:
    """One that is not waited for; what the power takes with it is another's test."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        pass


class DyingOs(QuickOs):
    """Nothing happens on it any more after so many operations: the process is dead.

    The operation in which it dies is half done where it can be.

    Args:
        operations: that still succeed.
    """

    def __init__(self, operations: int) -> None:
        self._left = operations
        self._lock = threading.Lock()

    @property
    def is_dead(self) -> bool:
        return self._left < 0

    def __getattr__(self, name: str) -> Any:
        done = getattr(os, name)

        def required(*args: Any, **named: Any) -> Any:
            if not self._spend():
                raise OSError(errno.EIO, "the process dies here")
            return done(*args, **named)

        changes = ("makedirs", "open", "replace", "unlink", "rmdir")
        return required if name in changes else done

    def _spend(self) -> bool:
        with self._lock:
            self._left -= 1
            if self._left < -1:
                raise OSError(errno.EIO, "the process is dead")
            return self._left >= 0

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self._spend():
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(errno.EIO, "the process dies here")
        return os.write(descriptor, data)


class FullOs(QuickOs):
    """One with room for so many bytes.

    Args:
        room_bytes: what it takes.
    """

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def write(self, descriptor: int, data: memoryview) -> int:
        taken = min(len(data), self.room_bytes)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room_bytes -= taken
        return os.write(descriptor, data[:taken])
