"""Disks on which something goes wrong, for the tests."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

from typing_extensions import override

from elche.checkpoint.files import Disk


class QuickDisk(Disk):
    """One that is not waited for; what the power takes with it is another's test."""

    @override
    def sync(self, descriptor: int) -> None:
        pass


class DyingDisk(QuickDisk):
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

    def _spend(self) -> bool:
        with self._lock:
            self._left -= 1
            if self._left < -1:
                raise OSError(errno.EIO, "the process is dead")
            return self._left >= 0

    def _require(self) -> None:
        if not self._spend():
            raise OSError(errno.EIO, "the process dies here")

    @override
    def make_folder(self, path: Path) -> None:
        self._require()
        super().make_folder(path)

    @override
    def create(self, path: Path) -> int:
        self._require()
        return super().create(path)

    @override
    def write(self, descriptor: int, data: memoryview) -> int:
        if not self._spend():
            super().write(descriptor, data[: len(data) // 2])
            raise OSError(errno.EIO, "the process dies here")
        return super().write(descriptor, data)

    @override
    def rename(self, source: Path, target: Path) -> None:
        self._require()
        super().rename(source, target)

    @override
    def remove(self, path: Path) -> None:
        self._require()
        super().remove(path)


class FullDisk(QuickDisk):
    """One with room for so many bytes.

    Args:
        room_bytes: what it takes.
    """

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    @override
    def write(self, descriptor: int, data: memoryview) -> int:
        taken = min(len(data), self.room_bytes)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room_bytes -= taken
        return super().write(descriptor, data[:taken])
