"""A rank's clock that its work and waits move: what a batch took, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elche.comm.gradients.buckets import bucket_pass
from elche.runtime.epochs import window_epoch
from elche.runtime.process.worker import Worker
from elche.runtime.sync import step_account, sync_epoch


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
    modules: tuple[Any, ...] = (bucket_pass, step_account, sync_epoch, window_epoch)
    before = [module.time for module in modules]
    sleep = Worker.sleep_until_message

    def sleep_by_clock(worker: Worker, timeout_s: float) -> None:
        """A window ends by the clock for a rank that is held, too."""
        sleep(worker, timeout_s)
        clock.advance(timeout_s)

    for module in modules:
        module.time = clock
    Worker.sleep_until_message = sleep_by_clock  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        Worker.sleep_until_message = sleep  # type: ignore[method-assign]
        for module, known in zip(modules, before, strict=True):
            module.time = known
