"""A rank's clock that only its own work moves: what a batch took, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elche.comm import bucket_pass
from elche.runtime import sync_epoch, window_epoch


class VirtualClock:
    """Stands in for the module ``time`` where a rank measures its batches."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    perf_counter = monotonic

    def advance(self, seconds: float) -> None:
        """Work of this rank takes so long."""
        self._now_s += seconds


@contextmanager
def virtual_clock() -> Iterator[VirtualClock]:
    """This rank's epochs measure by such a clock; deadlines stay real."""
    clock: Any = VirtualClock()
    modules: tuple[Any, ...] = (bucket_pass, sync_epoch, window_epoch)
    before = [module.time for module in modules]
    for module in modules:
        module.time = clock
    try:
        yield clock
    finally:
        for module, known in zip(modules, before, strict=True):
            module.time = known
