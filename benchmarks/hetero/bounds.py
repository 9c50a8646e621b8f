"""Best possible hardware efficiency of a contender's kind on emulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from elche.cadence.split import best_step_s, given_step_s
from elche.demo.workload import split_edges


@dataclass(frozen=True, kw_only=True)
class ContenderBounds:
    """Devices as declared, with what a batch cost each alone beside its samples.

    Attributes:
        batch_size: samples of a batch, of all ranks together.
        speeds: relative speeds of the devices.
        sample_s: declared seconds per sample at speed 1.
        alone: measured samples per second of each device alone. What a batch took there
            beyond its samples (fixed time, optimizer, next batch) each step costs.
        reduction_s: least time of a gradient sum on the link, hidden at best.
    """

    batch_size: int
    speeds: tuple[float, ...]
    sample_s: float
    alone: Sequence[float]
    reduction_s: float = 0.0

    def efficiency(self, name: str) -> float | None:
        """The bound of a contender by its name; None for those that train alone."""
        if name in ("ddp", "ddp-split"):
            shares = self.speeds if name == "ddp-split" else (1.0,) * len(self.speeds)
            edges = split_edges(self.batch_size, shares)
            parts = [stop - start for start, stop in pairwise(edges)]
            return self._of_step(given_step_s(parts, *self._costs))
        if not name.startswith("elche-"):
            return None
        sync = self._of_step(best_step_s(self.batch_size, *self._costs))
        if name == "elche-sync":
            return sync
        windows = self._of_windows()
        return max(sync, windows) if name == "elche-auto" else windows

    @property
    def _costs(self) -> tuple[list[float], list[float]]:
        """Each rank's seconds per sample, and per batch."""
        each = [self.sample_s / speed for speed in self.speeds]
        pairs = zip(self.alone, each, strict=True)
        return each, [max(0.0, self.batch_size * (1 / r - s)) for r, s in pairs]

    def _of_step(self, step_s: float) -> float:
        return self.batch_size / max(step_s, self.reduction_s) / sum(self.alone)

    def _of_windows(self) -> float:
        """Every rank runs batches of an equal part of the whole, and never waits."""
        local = max(1.0, self.batch_size / len(self.speeds))
        costs = zip(*self._costs, strict=True)
        return sum(local / (b + local * s) for s, b in costs) / sum(self.alone)
