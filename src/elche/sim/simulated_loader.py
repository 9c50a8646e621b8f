"""A rank's data loader in virtual time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from elche.coordination.accounts.batch_ranges import Range


@dataclass(slots=True)
class Loaded:
    """A batch, or a step's share of one, on its way to the training loop.

    Attributes:
        number: number of the batch or step.
        samples: number of samples to load.
        counted: number of these samples that count as this rank's.
        parts: positions of the counted samples in the epoch.
        ready_s: time at which it is loaded.
        load_s: loading time (s).
        was_late: whether the loader was idle until its lease arrived.
    """

    number: int
    samples: int
    counted: int
    parts: tuple[Range, ...]
    ready_s: float = 0.0
    load_s: float = 0.0
    was_late: bool = False


class Loader:
    """Loads leased batches in order, ``prefetch`` of them ahead of the current one.

    Args:
        seconds_per_sample: loading time (s) of a sample.
        prefetch: number of batches loaded ahead; with 0 each is loaded on request.
    """

    def __init__(self, seconds_per_sample: float, prefetch: int) -> None:
        self._per_sample_s = seconds_per_sample
        self._prefetch = prefetch
        self._queued: deque[Loaded] = deque()
        self._loading: deque[Loaded] = deque()
        self._free_s = 0.0

    @property
    def has_work(self) -> bool:
        """True if a batch is queued, loading or loaded."""
        return bool(self._queued or self._loading)

    def push(self, batches: Iterable[Loaded], now_s: float) -> None:
        """Adds leased batches."""
        self._queued.extend(batches)
        self._fill(now_s, was_late=True)

    def take(self, now_s: float) -> Loaded:
        """Returns the next batch, which is loaded at its ``ready_s``."""
        if not self._prefetch:
            batch = self._queued.popleft()
            batch.load_s = self._per_sample_s * batch.samples
            batch.ready_s = now_s + batch.load_s
            return batch
        batch = self._loading.popleft()
        self._fill(max(now_s, batch.ready_s), was_late=False)
        return batch

    def discard(self) -> None:
        """Drops all batches that have not been yielded."""
        self._queued.clear()
        self._loading.clear()

    def _fill(self, now_s: float, *, was_late: bool) -> None:
        while self._queued and len(self._loading) < self._prefetch:
            batch = self._queued.popleft()
            batch.was_late = was_late and self._free_s < now_s
            batch.load_s = self._per_sample_s * batch.samples
            self._free_s = max(self._free_s, now_s) + batch.load_s
            batch.ready_s = self._free_s
            self._loading.append(batch)
