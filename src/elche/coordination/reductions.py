"""How a window is reduced: weights, outer step, and what travels along. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elche.config import RunConfig, default_outer_lr
from elche.coordination.messages import Reduce, WindowClosed

SETTLED_WINDOWS = 8
FEW_WINDOWS = 100


def drift_weights(kind: str, samples: Sequence[int]) -> tuple[float, ...]:
    """Weight of each rank's drift: who did nothing weighs nothing; they sum to one.

    Args:
        kind: ``"equal"``, ``"samples"`` or ``"sqrt"`` (of the samples).
        samples: what each rank trained on in the window; not all zero.
    """
    if kind == "equal":
        raw = [float(count > 0) for count in samples]
    elif kind == "samples":
        raw = [float(count) for count in samples]
    else:
        raw = [math.sqrt(count) for count in samples]
    return tuple(weight / sum(raw) for weight in raw)


class ReductionPlanner:
    """Plans the reduction of each window.

    Args:
        config: the run's settings.
        world_size: ranks of the run.
        epochs: epochs of the run if known; a short run averages plainly.
    """

    def __init__(self, config: RunConfig, world_size: int, epochs: int | None) -> None:
        self._config = config
        self._world_size = world_size
        self._epochs = epochs
        self._windows = 0
        self._outer = config.outer

    def plan(
        self,
        closed: Sequence[WindowClosed],
        samples: Sequence[int],
        epoch_batches: int,
        window_batches: int,
    ) -> list[Reduce]:
        """The same plan for every rank.

        Args:
            closed: what each rank said when it closed the window, in order.
            samples: what each rank trained on in it.
            epoch_batches: batches of the epoch.
            window_batches: batches that El Che plans for a window now.
        """
        outer = self._outer_kind(epoch_batches, window_batches)
        self._windows += 1
        layouts = {report.state for report in closed}
        averages_state = self._config.optimizer_state == "average"
        lr = self._config.outer_lr or default_outer_lr(self._world_size)
        return [
            Reduce(
                rank=report.rank,
                epoch=report.epoch,
                window=report.window,
                weights=drift_weights(self._config.drift_weights, samples),
                include_state=averages_state
                and len(layouts) == 1
                and "" not in layouts,
                buffers=tuple(
                    sorted({i for other in closed for i in other.changed_buffers})
                ),
                outer=outer,
                outer_lr=1.0 if outer == "average" else lr,
                outer_momentum=self._config.outer_momentum,
            )
            for report in closed
        ]

    def _outer_kind(self, epoch_batches: int, window_batches: int) -> str:
        """Nesterov, unless the run is known to be too short for its momentum.

        Decided anew until El Che has settled.
        """
        if self._config.outer == "auto" and self._windows < SETTLED_WINDOWS:
            known = None if self._epochs is None else epoch_batches * self._epochs
            short = known is not None and known < FEW_WINDOWS * window_batches
            self._outer = "average" if short else "nesterov"
        return self._outer
