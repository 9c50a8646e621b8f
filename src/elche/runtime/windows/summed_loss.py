"""Gradients of a loss that is a sum over samples, under ``sync``.

The gradient of the sum over the union batch is the sum of the ranks' gradients. But in
a second backward pass before the optimizer's step ``p.grad`` already holds the sum of
the first, on every rank, and must not be added up again. So the reduction is a plain
mean over the ranks that have samples, and what a pass adds is multiplied by their
number before it gets to ``p.grad``. A part that weighs nothing adds nothing there, and
what was accumulated before takes part in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import nn

from elche.comm.gradients.gradient_factor import GradientFactor
from elche.comm.gradients.reducer import GradientReducer, Lost


@final
class SummedReducer:
    """Makes a reducer of means one of sums.

    Args:
        reducer: takes the mean over ranks that this sets; not attached yet.
        parameters: the ones it reduces.
    """

    def __init__(
        self, reducer: GradientReducer, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._reducer = reducer
        self._own_factor = GradientFactor(parameters)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The ones whose gradients it reduces."""
        return self._reducer.parameters

    @property
    def extra_bytes(self) -> int:
        """Memory held beside the gradients."""
        return self._reducer.extra_bytes

    @property
    def wait_s(self) -> float:
        """Seconds of this step in which nothing but other ranks was waited for."""
        return self._reducer.wait_s

    @property
    def backward_passes(self) -> int:
        """Backward passes reduced so far."""
        return self._reducer.backward_passes

    def attach(self) -> None:
        """Allocates buckets and hooks every parameter.

        Raises:
            ConfigError: there is no parameter.
        """
        self._reducer.attach()
        self._own_factor.attach()

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        self._own_factor.detach()
        self._reducer.detach()

    def begin_step(
        self, scale: float, active_ranks: int, weight: float | None = None
    ) -> None:
        """A batch begins; of its weight only whether it is 0 counts.

        Raises:
            CommunicationError: the backward pass before was broken off.
        """
        factor = float(max(1, active_ranks))
        self._own_factor.value = 0.0 if weight == 0.0 else factor
        self._reducer.begin_step(float(scale > 0) / factor, active_ranks, weight)

    def end_step(self) -> None:
        """Backward passes after this are the user's own.

        Raises:
            CommunicationError: the step's backward pass was broken off.
        """
        self._own_factor.value = 1.0
        self._reducer.end_step()

    def run_beneath(self, work: Callable[[], None] | None) -> None:
        """Passes on background work for the next backward."""
        self._reducer.run_beneath(work)

    def look_before(self, look: Callable[[dict[int, int]], None] | None) -> None:
        """Passes on what looks at gradients before they are reduced."""
        self._reducer.look_before(look)

    @property
    def is_joinable(self) -> bool:
        """See :meth:`GradientReducer.is_joinable`."""
        return self._reducer.is_joinable

    def correct_by(self, lost: Callable[[int], Lost] | None) -> None:
        """See :meth:`GradientReducer.correct_by`; the mean is one over ranks."""
        by_ranks = None
        if lost is not None:
            by_ranks = lambda passes: Lost(lost(passes).ranks)  # noqa: E731
        self._reducer.correct_by(by_ranks)

    def join_pass(self, active_ranks: int, *, is_active: bool) -> None:
        """See :meth:`GradientReducer.join_pass`."""
        self._reducer.join_pass(active_ranks, is_active=is_active)

    def hold(self, holds: bool) -> None:
        """Passes on whether gradients are kept for a later pass through the batch."""
        self._reducer.hold(holds)

    def rewind(self) -> None:
        """Passes on that a pass through the batch was broken off."""
        self._reducer.rewind()
