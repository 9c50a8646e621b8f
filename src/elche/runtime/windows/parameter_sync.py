"""Windows ended by parameter averaging, blocking or overlapped."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from elche.comm.averaging.averaging import Averager, ParameterAverager
from elche.comm.averaging.consensus_distance import SyncResult
from elche.comm.averaging.optimizer_state import Optimizers, forget_state
from elche.comm.averaging.overlap import OverlappedAverager
from elche.comm.gradients.gradient_factor import GradientFactor
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from elche.runtime.windows.window_sync import WindowSync


class AveragedSync(WindowSync):
    """Base of parameter averaging: weighs this rank's parameter delta.

    Args:
        averager: averages parameters.
        model: the model; a non-finite update drops its gradients,
        optimizers: and resets the state of these.
        own_factor: factor on the gradients of a batch, if the user weighs batches
            (weight 0 adds none) or losses are sums; else None.
        is_sum: losses are sums over a batch. A local batch's gradients are scaled by
            the number of local batches, so that a local step is as long as one
            device's.
    """

    def __init__(
        self,
        averager: Averager,
        model: nn.Module,
        optimizers: Optimizers,
        own_factor: GradientFactor | None,
        *,
        is_sum: bool = False,
    ) -> None:
        self._own_factor = own_factor
        self._is_sum = is_sum
        self.weighs_gradients = own_factor is not None
        self._averager = averager
        self._model, self._optimizers = model, optimizers
        self._was_finite = True
        self._is_diverged = False
        self._weight = self._current = 0.0

    @property
    @override
    def extra_bytes(self) -> int:
        return self._averager.extra_bytes

    @override
    def rebase(self) -> None:
        self._averager.rebase()

    @override
    def changed_buffers(self) -> tuple[int, ...]:
        return self._averager.changed_buffers()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._averager.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._averager.load_state_dict(state)

    @override
    def begin_batch(self, weight: float, parts: float = 1.0) -> None:
        self._current = weight
        if self._own_factor is not None:
            factor = parts if self._is_sum else 1.0
            self._own_factor.value = factor if weight > 0.0 else 0.0

    @override
    def batch_done(self) -> None:
        self._weight += self._current
        self._current = 0.0
        if self._own_factor is not None:
            self._own_factor.value = 1.0

    @override
    def detach(self) -> None:
        if self._own_factor is not None:
            self._own_factor.detach()

    @override
    def retire(self) -> None:
        self._averager.retire()

    @override
    def has_sum(self, plan: Reduce) -> bool:
        return self._averager.has_sum(plan)

    @override
    def copy_result(
        self, group: Group, source: int, plan: Reduce, *, lacks: bool, keeps: bool
    ) -> None:
        self._averager.copy_result(group, source, plan, lacks=lacks, keeps=keeps)
        if lacks:
            self._reset_diverged()

    @override
    def reconnect(self, group: Group) -> None:
        self._averager.reconnect(group)

    def _reset_diverged(self) -> None:
        """Resets optimizers of a diverged rank, after it has adopted the result."""
        if not self._was_finite:
            for optimizer in self._optimizers():
                forget_state(optimizer)

    def close(self, *, begins: bool) -> bool:
        """Ends the window; drops the gradients of a discarded update too."""
        self.has_moved = not self._is_diverged or self._averager.has_moved
        self._was_finite = self._take(self._weight, begins=begins)
        self._weight = 0.0
        if not self._was_finite:
            for parameter in self._model.parameters():
                parameter.grad = None
        self._is_diverged = not (self._was_finite and self.has_moved)
        return self._was_finite

    @abstractmethod
    def _take(self, weight: float, *, begins: bool) -> bool:
        """Ends a window of this weight; True if all parameters are finite."""


@final
class ParameterSync(AveragedSync):
    """Parameters averaged at the end of the window."""

    _averager: ParameterAverager

    def _take(self, weight: float, *, begins: bool) -> bool:
        return self._averager.is_finite

    def reduce(self, plan: Reduce) -> SyncResult:
        """Averages now, and resets optimizers of a diverged rank."""
        result = self._averager.synchronise(plan)
        self._reset_diverged()
        return result

    @override
    def finish(self, plan: Reduce, *, is_drained: bool) -> SyncResult:
        result = self._averager.complete(plan)
        self._reset_diverged()
        return result


@final
class OverlappedSync(AveragedSync):
    """Parameters averaged while the next window runs."""

    is_overlapped = True
    _averager: OverlappedAverager

    def _take(self, weight: float, *, begins: bool) -> bool:
        """Begins to reduce on a rank that has trained."""
        return self._averager.snapshot(float(weight > 0), begins=begins)

    @override
    def begin(self, plan: Reduce) -> None:
        self._averager.begin(plan)

    @override
    def poll(self) -> bool:
        return self._averager.poll()

    @override
    def has_sum(self, plan: Reduce) -> bool:
        if self._averager.is_sent:
            self._averager.begin(plan)
        return self._averager.is_begun and self._averager.has_sum(plan)

    @override
    def common(self) -> dict[int, torch.Tensor]:
        return self._averager.common()

    @override
    def finish(self, plan: Reduce, *, is_drained: bool) -> SyncResult:
        result = self._averager.adopt(plan, drained=is_drained)
        self._reset_diverged()
        return result
