"""Windows that end in averaged parameters, at their end or while the next one runs."""

from __future__ import annotations

import logging
from typing import Any, final

from elche.comm.averaging import Averager, ParameterAverager
from elche.comm.gradient_factor import GradientFactor
from elche.comm.overlap import OverlappedAverager
from elche.comm.spread import SyncResult
from elche.coordination.instructions import Reduce
from elche.coordination.reductions import drift_weight
from elche.runtime.local_steps import LocalSteps
from elche.runtime.window_sync import WindowSync

logger = logging.getLogger(__name__)


class AveragedSync(WindowSync):
    """Counts what this rank's drift weighs; how it is averaged is a subclass'.

    Args:
        averager: averages parameters.
        steps: this rank's own; optimizers lose their state if it went astray.
        own_factor: of the gradients of a batch, where each says what it weighs: one
            that weighs nothing adds none.
    """

    def __init__(
        self,
        averager: Averager,
        steps: LocalSteps,
        own_factor: GradientFactor | None,
    ) -> None:
        self._own_factor = own_factor
        self._averager = averager
        self._steps = steps
        self._was_finite = True
        self._in_hand = 0.0
        self._weights: list[float] = []

    @property
    def extra_bytes(self) -> int:
        """See :meth:`WindowSync.extra_bytes`."""
        return self._averager.extra_bytes

    def rebase(self) -> None:
        """See :meth:`WindowSync.rebase`."""
        self._averager.rebase()

    def changed_buffers(self) -> tuple[int, ...]:
        """See :meth:`WindowSync.changed_buffers`."""
        return self._averager.changed_buffers()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`WindowSync.state_dict`."""
        return self._averager.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """See :meth:`WindowSync.load_state_dict`."""
        self._averager.load_state_dict(state)

    @property
    def is_finite(self) -> bool:
        """See :attr:`WindowSync.is_finite`."""
        return self._averager.is_finite

    @property
    def has_finite_gradients(self) -> bool:
        """See :attr:`WindowSync.has_finite_gradients`."""
        return self._averager.has_finite_gradients

    @property
    def has_stepped(self) -> bool:
        """See :attr:`WindowSync.has_stepped`."""
        return self._steps.has_stepped

    @property
    def accumulates(self) -> bool:
        """See :attr:`WindowSync.accumulates`."""
        return self._steps.accumulates

    def keep(self) -> None:
        """See :meth:`WindowSync.keep`."""
        self._steps.keep()

    def restore(self, batches: int) -> None:
        """See :meth:`WindowSync.restore`."""
        self._steps.restore()
        self._leave_out(batches)

    def drop_gradients(self, batches: int) -> None:
        """See :meth:`WindowSync.drop_gradients`."""
        self._steps.drop_gradients()
        self._leave_out(batches)

    def forget(self) -> None:
        """See :meth:`WindowSync.forget`."""
        self._steps.forget()

    def _leave_out(self, batches: int) -> None:
        """The window's last batches weigh nothing."""
        del self._weights[len(self._weights) - batches :]

    def begin_batch(self, weight: float) -> None:
        """See :meth:`WindowSync.begin_batch`."""
        self._steps.begin_batch()
        self._in_hand = weight
        if self._own_factor is not None:
            self._own_factor.value = float(weight > 0.0)

    def batch_done(self) -> None:
        """See :meth:`WindowSync.batch_done`."""
        self._steps.batch_done()
        self._weights.append(self._in_hand)
        self._in_hand = 0.0
        if self._own_factor is not None:
            self._own_factor.value = 1.0

    def detach(self) -> None:
        """See :meth:`WindowSync.detach`."""
        if self._own_factor is not None:
            self._own_factor.detach()

    def retire(self) -> None:
        """See :meth:`WindowSync.retire`."""
        self._averager.retire()

    def _end_weight(self) -> float:
        """The window ends: what its batches weigh."""
        weight = sum(self._weights)
        self._weights.clear()
        return weight

    def _go_back(self) -> None:
        """What this rank has learned is none: gradients that wait are of that.

        Those that are numbers go too: their batches are trained on again.
        """
        if self._was_finite:
            return
        if self._steps.accumulates or not self.has_finite_gradients:
            self._steps.drop_gradients()


@final
class ParameterSync(AveragedSync):
    """Parameters averaged at the end of the window.

    Args:
        averager: averages them.
        steps: this rank's own; optimizers lose their state if it went astray, where
            that is not averaged.
        own_factor: see `AveragedSync`.
    """

    _averager: ParameterAverager

    def __init__(
        self,
        averager: ParameterAverager,
        steps: LocalSteps,
        own_factor: GradientFactor | None,
    ) -> None:
        super().__init__(averager, steps, own_factor)
        self._has_told = False

    def state_layout(self) -> str:
        """See :meth:`WindowSync.state_layout`."""
        return self._averager.state_layout()

    def close(self, *, begins: bool) -> bool:
        """See :meth:`WindowSync.close`."""
        self._was_finite = self.is_finite
        self._end_weight()
        self._go_back()
        return self._was_finite

    def reduce(self, plan: Reduce) -> SyncResult:
        """See :meth:`WindowSync.reduce`; a rank that went astray starts anew."""
        if plan.state_apart and not self._has_told:
            self._has_told = True
            logger.warning(
                "rank %d: no optimizer state is averaged while ranks %s hold other "
                "state than most (where an optimizer has not stepped yet, say); here "
                "%s",
                plan.rank,
                list(plan.state_apart),
                self._steps.states_in_words(),
            )
        result = self._averager.synchronise(plan)
        if not self._was_finite:
            self._steps.forget_states(only_lost=plan.include_state)
        return result


@final
class OverlappedSync(AveragedSync):
    """Parameters averaged while the next window runs.

    Args:
        averager: averages them.
        steps: this rank's own; optimizers lose their state if it went astray.
        own_factor: see `AveragedSync`.
        drift_weights: how drifts are weighted; see `drift_weight`.
    """

    is_overlapped = True
    _averager: OverlappedAverager

    def __init__(
        self,
        averager: OverlappedAverager,
        steps: LocalSteps,
        own_factor: GradientFactor | None,
        drift_weights: str,
    ) -> None:
        super().__init__(averager, steps, own_factor)
        self._drift_weights = drift_weights

    def close(self, *, begins: bool) -> bool:
        """See :meth:`WindowSync.close`; a rank that trained begins to reduce."""
        weight = drift_weight(self._drift_weights, self._end_weight())
        self._was_finite = self._averager.snapshot(weight, begins=begins)
        self._go_back()
        return self._was_finite

    def begin(self, plan: Reduce) -> None:
        """See :meth:`WindowSync.begin`."""
        self._averager.begin(plan)

    def poll(self) -> bool:
        """See :meth:`WindowSync.poll`."""
        return self._averager.poll()

    def finish(self, plan: Reduce, *, is_drained: bool) -> SyncResult:
        """See :meth:`WindowSync.finish`."""
        result = self._averager.adopt(plan, drained=is_drained)
        if not self._was_finite:
            self._steps.forget_states()
        return result
