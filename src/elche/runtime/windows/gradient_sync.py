"""Windows that end in one common step on the gradients summed over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from elche.comm.averaging.window_sync import SyncResult, WindowSync
from elche.comm.gradients.gradient_hooks import (
    GradientHooks,
    at_backward_end,
)
from elche.comm.gradients.gradient_window import GradientWindow
from elche.comm.model_buffers.window_buffers import WindowBuffers
from elche.comm.transport.exchange import succeeded
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from elche.devices.streams import refuse_capture
from elche.errors import CommunicationError, ConfigError, RankLostError
from elche.runtime.sync.resume_sync import take_step
from elche.runtime.watch.rate_watch import set_rate
from elche.torch_internals.held import foreach_mul_
from elche.torch_internals.passes import graph_task_id


@final
class GradientSync(WindowSync):
    """Gradients summed over the window; one common optimizer step at its end.

    Gradients are removed at the end of every backward pass, so that the loop's own
    ``optimizer.step()`` finds none and does nothing. A batch without a complete
    backward pass has no part in the mean.

    Args:
        parameters: the trainable parameters.
        optimizer: steps them at the window's end.
        window: sums the gradients.
        buffers: averages changed buffers of the model.
        max_grad_norm: clip the reduced gradient to this norm.
        is_sum: losses are sums over a batch, and the gradient is that of the sum over
            all samples of the window; otherwise both are means.
    """

    weighs_gradients = True
    is_common_step = True
    takes_steps = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        window: GradientWindow,
        buffers: WindowBuffers,
        *,
        max_grad_norm: float | None = None,
        is_sum: bool = False,
    ) -> None:
        self._is_sum = is_sum
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._window = window
        self._buffers = buffers
        self._max_grad_norm = max_grad_norm
        self._weight = 0.0
        self._was_finite = True
        self._rates: tuple[torch.Tensor, Any] | None = None
        self._pass: int | None = None
        self._touched: list[torch.Tensor] = []
        self._index = {id(p): at for at, p in enumerate(self._parameters)}
        self._holds = True  # until a batch begins: what comes is the script's own
        self._has_ended = False
        self._hooks = GradientHooks(self._parameters)
        self._hooks.attach(self._on_gradient)

    @override
    def detach(self) -> None:
        self._hooks.detach()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._holds:
            return
        index = self._index.get(id(parameter))
        if index is None:
            return  # what a hook before returned, which torch refuses after all of them
        if parameter.grad is not None or self._hooks.was_taken(index):
            self._touched.append(parameter)  # others came without: there is none to add
        number = graph_task_id()
        if self._pass != number:  # the first of a pass, or of a nested one
            refuse_capture()
            self._pass = number
            at_backward_end(self._end_backward)

    @override
    def refuse_step(self, optimizer: torch.optim.Optimizer) -> None:
        held, moved = (
            {id(p) for group in each.param_groups for p in group["params"]}
            for each in (optimizer, self._optimizer)
        )
        alone = len((held - moved).intersection(map(id, self._parameters)))
        if alone:
            raise ConfigError(
                f"a second optimizer ({type(optimizer).__name__}) steps {alone} of "
                "the model's parameters, but a window steps only the optimizer given "
                "to elche.setup; leave update='gradients' out, or choose policy 'sync'"
            )

    @override
    def hold(self, holds: bool) -> None:
        self._holds = holds

    def rewind(self) -> None:
        """Discards an interrupted pass, of which nothing was added."""
        self._pass = None
        self._touched.clear()

    def _end_backward(self) -> None:
        self._pass, self._has_ended = None, True
        taken = next((p for p in self._touched if p.grad is None), None)
        self._touched.clear()
        if taken is not None:
            raise ConfigError(
                "a hook removed the gradient of a parameter of shape "
                f"{list(taken.shape)} before the window's step; leave it to the "
                "optimizer given to elche.setup, or leave update='gradients' out"
            )
        self._add_gradients()

    def _add_gradients(self) -> None:
        """Adds ``p.grad``: a sum over samples as it is, a mean times its weight."""
        weight = float(self._weight > 0) if self._is_sum else self._weight
        self._window.add(weight, is_whole=False)

    @property
    @override
    def extra_bytes(self) -> int:
        return self._window.extra_bytes

    def rebase(self) -> None:
        """Rebases buffers; parameters change only by common steps."""
        self._buffers.rebase()

    @override
    def changed_buffers(self) -> tuple[int, ...]:
        return self._buffers.changed()

    @override
    def begin_batch(self, weight: float, parts: float = 1.0) -> None:
        self._hooks.keep_last()
        self._weight = weight
        self._pass = None
        self._touched.clear()
        self._holds = self._has_ended = False

    @override
    def batch_done(self) -> None:
        if self._pass is not None:  # broken off, and the loop caught the error
            self._window.clear()
        if self._is_sum:  # before the batch is counted
            self._add_gradients()
        self._window.add(self._weight if self._has_ended else 0.0)
        self._weight, self._holds = 0.0, True

    def close(self, *, begins: bool) -> bool:
        """Ends the window; non-finite gradients are not sent."""
        self._was_finite = self._window.is_finite
        return self._was_finite

    @override
    def reduce(self, plan: Reduce) -> SyncResult:
        """Sends all sums before any result is applied: all of them or none."""
        weight = self._window.samples if self._was_finite else 0.0
        self._window.begin(counts=self._was_finite)
        self._buffers.take()
        self._buffers.begin(plan)
        # A schedule in the loop has brought each rank as far as its own batches, and a
        # common step needs a common rate: its mean over the window's batches.
        rates = [weight, *(rate * weight for rate in self._own_rates())]
        message = torch.tensor(rates, dtype=torch.float64, device="cpu")
        self._rates = message, self._window.group.all_reduce_async(message)
        return self.finish(plan, is_drained=True)

    @override
    def finish(self, plan: Reduce, *, is_drained: bool) -> SyncResult:
        assert self._rates is not None
        (message, work), own = self._rates, self._own_rates()
        self._buffers.wait()
        self._window.group.wait(work, "sharing learning rates")
        total = self._window.finish()
        self._buffers.apply()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._is_sum and gradients:  # of its mean
            with torch.no_grad():
                foreach_mul_(gradients, total)
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        weight, *sums = message.tolist()
        self._set_rates([each / weight for each in sums] if weight > 0 else own)
        self.takes_steps = True
        self._optimizer.step()
        self.takes_steps = False
        self._set_rates(own)
        self._rates = None
        self._window.clear()  # also of what this optimizer does not hold
        return SyncResult(divergence=0.0, parameter_norm=None)

    @override
    def has_sum(self, plan: Reduce) -> bool:
        if self._rates is None or not succeeded(self._rates[1]):
            return False
        return self._window.is_summed and self._buffers.is_summed

    @override
    def copy_result(
        self, group: Group, source: int, plan: Reduce, *, lacks: bool, keeps: bool
    ) -> None:
        """Copies the last common step's result to the ranks that lack it.

        Raises:
            CommunicationError: another rank has died meanwhile.
        """
        own = self._own_rates()
        try:
            take_step(group, self._parameters, self._optimizer, source)
            self._buffers.copy_result(group, source, plan, lacks=lacks)
        except RankLostError as error:
            raise CommunicationError(
                "a second rank died while ranks copied a common step from another: "
                "restart the run from its last checkpoint (--max-restarts)"
            ) from error
        self._set_rates(own)
        if lacks:
            self._window.skip()
            self._buffers.apply()

    @override
    def reconnect(self, group: Group) -> None:
        self._rates = None
        self._window.connect(group)
        self._buffers.connect(group)
        self._buffers.join_own()

    def _own_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            set_rate(group, rate)
