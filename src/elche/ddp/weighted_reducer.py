"""Reductions of `elche.DistributedDataParallel`, weighted by rank.

A rank knows its own weight (samples, tokens) when backward begins, not the others'. It
sends its gradients times w_r / T, where T is the total of the pass before, and in a
small message beside them its weight. The sum is then multiplied by T / N, N being the
true total: a pass over the result that falls away where the total stays the same. In
the first pass, and for float16, whose range that could leave, ranks wait for N first.

The same message marks a rank with nothing to contribute, and which buffers were
written, so that a rank without a batch takes part with a pass of zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import BucketInfo
from elche.comm.gradients.buckets.bucket_contract import Closed, PassOptions
from elche.comm.gradients.buckets.bucket_pass import BucketPass
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.process_group import Group
from elche.ddp.accumulated import Accumulated
from elche.ddp.buffer_spreader import BufferSpreader
from elche.ddp.group import control_device
from elche.ddp.turns import Turn
from elche.errors import CommunicationError, ConfigError, ElcheError
from elche.torch_internals.passes import graph_task_id, queue_callback

LossReduction = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True)
class DdpReduction:
    """What came of one reduction.

    Attributes:
        weights: of each rank; 0 for one that had nothing to contribute.
        joined: ranks that have ended their loop (:meth:`join`).
        buckets: messages of gradients.
        launched_early: how many of them went before backward had ended here.
        wait_s: seconds from the end of backward to the arrival of the last bucket.
    """

    weights: tuple[float, ...]
    joined: tuple[int, ...]
    buckets: int
    launched_early: int
    wait_s: float

    @property
    def total_weight(self) -> float:
        """Of all ranks."""
        return sum(self.weights)

    @property
    def source(self) -> int | None:
        """The lowest rank that contributed, or None."""
        return next((rank for rank, w in enumerate(self.weights) if w > 0), None)


class WeightedReducer:
    """Reduces gradients by weights that are known only rank by rank.

    Args:
        named: the trainable parameters and their names, each once, as defined.
        group: the process group.
        options: how gradients are packed, sent and handed out.
        loss_reduction: ``"mean"``: the gradient of the weighted mean of the ranks'
            losses; ``"sum"``: of their sum.
        buffers: keeps buffers equal, or None.
        turn: compares whose pass it is, where the group serves several wrappers.

    Attributes:
        last: what came of the last reduction.
        divides_by_world: the mean is divided by all ranks, not only by those that
            contributed.
        refuses_joined: a rank that has ended its loop is an error on all ranks.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        options: PassOptions,
        loss_reduction: LossReduction,
        buffers: BufferSpreader | None,
        turn: Turn,
    ) -> None:
        self._group = group
        self._turn = turn
        self._parameters = [parameter for _, parameter in named]
        self._names = [name for name, _ in named]
        self._is_mean = loss_reduction == "mean"
        self._buffers = buffers
        self._pass = BucketPass(self._parameters, self._names, group, options, self)
        self._control: Exchange | None = None
        self._counted = 0.0
        self._accumulated = Accumulated()
        self._set: float | None = None
        self._weight = 0.0
        self._has_float16 = any(p.dtype is torch.float16 for p in self._parameters)
        self._is_joined = False
        self._is_entered = False
        self._before = 0.0, 0
        self._reference = 0.0
        self._agreed: list[float] | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._is_armed = False
        self._pending: float | None = None
        self.divides_by_world = False
        self.refuses_joined = False
        self.last: DdpReduction | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is reduced, as defined."""
        return self._parameters

    @property
    def buckets(self) -> tuple[BucketInfo, ...]:
        """What each bucket holds, in order of reduction."""
        return self._pass.infos()

    @property
    def extra_bytes(self) -> int:
        """Memory of the buckets, beside the gradients of plain training."""
        return self._pass.extra_bytes

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient that has been accumulated is reduced.

        In a backward pass that comes to the parameters by another way than what the
        last forward returned (a loss kept on the module), it is that forward's.
        """
        self._forget_dropped(but=parameter)
        if not self._is_armed and self._pending is not None:
            self.enter_backward(self._pending)
        if not self._is_armed:
            self._accumulated.add(parameter)
        return self._is_armed

    @property
    def order(self) -> list[int] | None:
        """The observed order of the parameters, if there was a backward."""
        return self._pass.order if self._pass.is_ordered else None

    def attach(self, order: Sequence[int] | None) -> None:
        """Allocates messages, together with all ranks, and hooks every parameter.

        Args:
            order: of the parameters, if one was observed before.
        """
        extra = self._buffers.count if self._buffers is not None else 0
        numel = 2 * (self._group.world_size + extra)
        where = control_device(self._group)
        self._control = open_exchange(self._group, numel, torch.float64, where, sides=2)
        self._pass.attach(order)
        if not self._is_mean:
            self._handles = [
                parameter.register_hook(self._refuser(name, parameter))
                for name, parameter in zip(self._names, self._parameters, strict=True)
            ]

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        self._pass.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def expect_unused(self, indices: frozenset[int]) -> None:
        """Says which parameters a forward did not use."""
        self._pass.expect_unused(indices)

    def begin_forward(self) -> None:
        """Refuses to go on where a backward was broken off.

        One that had no gradient yet is forgotten. A forward inside a backward (a
        recomputation) begins nothing.

        Raises:
            CommunicationError: its reduction cannot be completed any more.
        """
        if is_in_backward():
            return
        if self._is_entered:
            self._leave_backward()
        if self._pass.abandon():
            raise CommunicationError(
                "the backward pass before was broken off by an error, so its reduction "
                "cannot be completed; form a new group and call set_group()"
            )
        self._pass.keep_last()

    def enter_backward(self, weight: float) -> None:
        """Called inside a backward pass that is to be reduced, as it begins.

        Args:
            weight: added to this rank's, if a gradient of the model's comes.
        """
        self._forget_dropped()
        if not self._is_entered:
            self._is_entered = True
            self._before = self._counted, self._pass.passes
            self._pass.await_end()
            queue_callback(self._leave_backward)
        self._is_armed, self._pending = True, None
        self._counted += weight

    def _leave_backward(self) -> None:
        """After the pass: takes back what a backward without gradients has set."""
        self._is_entered, self._pending = False, None
        counted, passes = self._before
        if passes == self._pass.passes:
            self._counted, self._is_armed = counted, False

    def expect_backward(self, weight: float | None, *, adds: bool = False) -> None:
        """Says what the last forward weighs, wherever its backward will begin.

        Args:
            weight: None: the next gradients are not to be reduced.
            adds: to what was expected already: its outputs tell nothing of backwards.
        """
        if not is_in_backward():
            before = self._pending or 0.0 if adds else 0.0
            self._pending = None if weight is None else before + weight

    def count(self, weight: float) -> None:
        """Adds to this rank's weight in the next reduction."""
        self._forget_dropped()
        self._counted += weight

    def _forget_dropped(self, but: torch.Tensor | None = None) -> None:
        """Takes back the weight of gradients that the loop has dropped since."""
        if self._accumulated.was_dropped(but):
            self._counted = 0.0

    @property
    def has_counted(self) -> bool:
        """Whether a forward pass weighs in the next reduction already."""
        self._forget_dropped()
        return self._counted > 0.0 or self._pending is not None

    @property
    def weight_set(self) -> float | None:
        """What :meth:`set_weight` has set for the next reduction."""
        return self._set

    def set_weight(self, weight: float) -> None:
        """Sets this rank's weight in the next reduction, whatever was counted."""
        self._set = weight

    def run_empty(self, *, joined: bool = False) -> DdpReduction:
        """Takes part in a reduction without a backward; returns what came of it.

        Args:
            joined: this rank's loop is over: it takes no gradients either.

        Raises:
            CommunicationError: it failed, or a rank did not arrive in time.
        """
        self._forget_dropped()
        self._is_joined = joined
        try:
            self._pass.run_without_backward()
        finally:
            self._is_joined = False
        assert self.last is not None
        return self.last

    def open_pass(self, side: int) -> float:
        """Sends this rank's weight; returns what its gradients are multiplied by."""
        assert self._control is not None
        self._turn.begin()
        world_size, rank = self._group.world_size, self._group.rank
        self._weight = self._counted if self._set is None else self._set
        values = [0.0] * self._control.contribution(side).numel()
        values[rank] = self._weight
        values[world_size + rank] = float(self._is_joined)
        if self._buffers is not None:
            own = 2 * world_size + self._buffers.count
            for index in self._buffers.changed():
                values[own + index] = 1.0
            for index in self._buffers.written() if self._weight > 0 else ():
                values[2 * world_size + index] = 1.0
        message = self._control.contribution(side)
        message.copy_(torch.tensor(values, dtype=torch.float64, device="cpu"))
        self._control.begin(side)
        self._agreed = None
        self._pass.wait_s = 0.0
        if not self._is_mean:
            return float(self._weight > 0)
        if self._reference == 0.0 or self._has_float16:
            total = sum(self._agree()[:world_size])
            self._reference = total or self._reference
        return self._weight / self._reference if self._reference else 0.0

    def close_pass(self, side: int) -> Closed:
        """Finds the true total, and spreads buffers."""
        world_size = self._group.world_size
        values = self._agree()
        weights = values[:world_size]
        self.last = DdpReduction(
            weights=tuple(weights),
            joined=tuple(r for r in range(world_size) if values[world_size + r]),
            buckets=len(self._pass.buckets),
            launched_early=self._pass.launched_early,
            wait_s=self._pass.wait_s,
        )
        source, total = self.last.source, self.last.total_weight
        if self._buffers is not None and source is not None:
            flags, count = values[2 * world_size :], self._buffers.count
            written = [index for index in range(count) if flags[index]]
            own = [index for index in range(count) if flags[count + index]]
            self._buffers.spread(written, own, source, side)
        factor = 1.0
        if self._is_mean and source is not None:
            factor = self._reference / total
            self._reference = total
            if self.divides_by_world:
                factor *= sum(weight > 0 for weight in weights) / world_size
        hand_out = not self._is_joined
        self._counted, self._set = 0.0, None
        self._accumulated.clear()
        self._is_armed, self._pending = False, None
        if self.refuses_joined and self.last.joined:
            raise ElcheError(
                f"ranks {list(self.last.joined)} have exhausted their inputs, and "
                "throw_on_early_termination is set"
            )
        return Closed(source=source, factor=factor, hand_out=hand_out)

    def make_static(self) -> None:
        """Every backward pass is taken for one like the first."""
        self._pass.make_static()

    def _agree(self) -> list[float]:
        """The sum of what all ranks said in this pass."""
        if self._agreed is None:
            assert self._control is not None
            total = self._control.finish("agreeing on weights")
            self._agreed = [float(value) for value in total.tolist()]
        return self._agreed

    def _refuser(
        self, name: str, parameter: nn.Parameter
    ) -> Callable[[torch.Tensor], None]:
        me = weakref.ref(self._pass)

        def refuse(gradient: torch.Tensor) -> None:
            passes = me()
            if passes is not None and passes.is_given(parameter):
                given = parameter.grad
                if given is not None and bool(given.count_nonzero()):
                    raise ConfigError(
                        f"{name}: loss_reduction='sum' cannot add to a gradient that "
                        "was already summed over the ranks; put all backwards of a "
                        "step but the last into no_sync(), and call zero_grad() "
                        "after the step"
                    )

        return refuse


def is_in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return graph_task_id() != -1
