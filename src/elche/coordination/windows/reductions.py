"""Reduction plans of windows: weights, outer step, state and buffers. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from elche.config import RunConfig, default_outer_lr
from elche.coordination.protocol.instructions import Reduce
from elche.coordination.windows.window_book import Part, Reduction

SETTLED_WINDOWS = 8
FEW_WINDOWS = 4


def drift_weights(kind: str, samples: Sequence[float]) -> tuple[float, ...]:
    """Weight of each rank's drift: who did nothing weighs nothing; they sum to one.

    Args:
        kind: ``"equal"``, ``"samples"`` or ``"sqrt"`` (of the samples).
        samples: what each rank trained on in the window, or the weight given to it.
    """
    if not any(samples):
        return (0.0,) * len(samples)
    raw = [drift_weight(kind, count) for count in samples]
    total = sum(raw)
    return tuple(weight / total for weight in raw)


def drift_weight(kind: str, samples: float) -> float:
    """Weight of one rank's drift, relative to the others'.

    Args:
        kind: ``"equal"``, ``"samples"`` or ``"sqrt"`` (of the samples).
        samples: what the rank trained on in the window, or the weight given to it.
    """
    if kind == "equal":
        return float(samples > 0)
    return float(samples) if kind == "samples" else math.sqrt(samples)


def _apart(parts: Mapping[int, Part]) -> tuple[int, ...]:
    """Ranks whose optimizers hold other state than most of those that hold any."""
    layouts = {r: part.closed.state for r, part in parts.items() if part.closed}
    counts = Counter(layouts.values())
    if len(counts) < 2:
        return ()
    usual = max(counts, key=lambda layout: (layout != "", counts[layout]))
    return tuple(rank for rank, layout in layouts.items() if layout != usual)


class ReductionPlanner:
    """Plans the reduction of each window.

    Args:
        config: the run's settings.
        epochs: epochs of the run if known; a short run averages plainly.
    """

    def __init__(self, config: RunConfig, epochs: int | None) -> None:
        self._config = config
        self._epochs = epochs
        self._windows = 0
        self._outer = config.windows.outer.optimizer

    def settings(
        self,
        parts: Mapping[int, Part],
        epoch_batches: int,
        window_batches: int,
    ) -> dict[str, Any]:
        """How a window is reduced, but for the weights.

        Args:
            parts: what each rank did in it, and said when it closed it.
            epoch_batches: batches of the epoch.
            window_batches: batches that El Che plans for a window now.
        """
        closed = [part.closed for part in parts.values() if part.closed is not None]
        layouts = {report.state for report in closed}
        averages = self._config.averages_state and len(layouts) == 1
        if not any(part.weight for part in parts.values()):
            kind = "average"  # nothing to step along: momentum must not move it
        else:
            kind = self._outer_kind(epoch_batches, window_batches)
            self._windows += 1
        lr = self._config.windows.outer.lr or default_outer_lr(len(parts), kind)
        return {
            "include_state": averages and "" not in layouts,
            "buffers": tuple(
                sorted({i for report in closed for i in report.changed_buffers})
            ),
            "outer": kind,
            "outer_lr": 1.0 if kind == "average" else lr,
            "outer_momentum": self._config.windows.outer.momentum,
        }

    def plan(
        self,
        parts: Mapping[int, Part],
        settings: Mapping[str, Any],
        epoch: int,
        reduction: Reduction,
    ) -> list[Reduce]:
        """The reduction's instructions, one for each rank.

        Args:
            parts: what each rank did in the window.
            settings: from :meth:`settings`, or a recorded plan's.
            epoch: the epoch.
            reduction: which window's, and which attempt.
        """
        counts = [part.weight for part in parts.values()]
        weights = drift_weights(self._config.windows.drift_weights, counts)
        active = sum(count > 0 for count in counts)
        shared: dict[str, Any] = dict(settings)
        if self._config.averages_state:
            shared["state_apart"] = _apart(parts)
        return [
            Reduce(
                rank=rank,
                epoch=epoch,
                window=reduction.window,
                attempt=reduction.attempt,
                weight=weight,
                active_ranks=active,
                **shared,
            )
            for rank, weight in zip(parts, weights, strict=True)
        ]

    def _outer_kind(self, epoch_batches: int, window_batches: int) -> str:
        """Nesterov, unless the run is known to be too short for its momentum.

        Decided anew until El Che has settled.
        """
        if (
            self._config.windows.outer.optimizer == "auto"
            and self._windows < SETTLED_WINDOWS
        ):
            known = None if self._epochs is None else epoch_batches * self._epochs
            short = known is not None and known < FEW_WINDOWS * window_batches
            self._outer = "average" if short else "nesterov"
        return self._outer
