"""Optimizer state averaged over the ranks, with the weights of their updates.

What is averaged are the entries of a parameter's state that are shaped like it:
moments, momentum buffers. Step counts stay each rank's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from elche.comm.tensors.flat import FlatImage, FlatLayout, wire_dtype
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.process_group import Group

Optimizers = Callable[[], Sequence[torch.optim.Optimizer]]
"""Those that step the model now: a loop may step with more than it began with."""
Means = list[tuple[FlatLayout, torch.Tensor]]
"""Averaged state of each dtype, flat."""
COUNTERS = ("step", "mu_product", "eta", "mu")
"""State that follows from a rank's own number of steps."""


class _StateGroup:
    """State tensors of one wire dtype, and their message."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, group: Group
    ) -> None:
        self.layout = FlatLayout(tensors, dtype)
        self.exchange: Exchange = open_exchange(
            group, self.layout.numel, dtype, torch.device("cpu")
        )
        self._message = self.layout.over(self.exchange.contribution(0))
        self._work: FlatImage = self.layout.workspace()

    @property
    def host_bytes(self) -> int:
        message = self.exchange.contribution(0)
        copies = 2 if self.layout.is_staged else 1
        return copies * message.numel() * message.element_size()

    def send(self, weight: float) -> None:
        if weight != 0.0:
            self.layout.fetch(self._work)
            self.layout.settle()
        for index, message in enumerate(self._message.parts):
            if weight == 0.0:
                message.zero_()
            else:
                self.layout.read(index, self._work)
                torch.mul(self._work.parts[index], weight, out=message)
        self.exchange.begin(0)

    def replace(self) -> None:
        for index, segment in enumerate(self.layout.segments):
            part = self._work.parts[index]
            self.exchange.sum_into(segment.start, segment.stop, part)
            self.layout.write(index, self._work)
        self.exchange.release()
        self.layout.flush(self._work)


class OptimizerStateAverager:
    """Averages the state of all optimizers that step the parameters.

    Args:
        parameters: the trained parameters, in the same order on every rank.
        optimizers: those that step them.
        group: the process group.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizers: Optimizers,
        group: Group,
    ) -> None:
        self._parameters = list(parameters)
        self._optimizers = optimizers
        self._group = group
        self._groups: dict[torch.dtype, _StateGroup] = {}
        self._sent: list[_StateGroup] = []
        self._applied: list[_StateGroup] = []
        self._received: Means = []
        self._is_begun = False

    @property
    def host_bytes(self) -> int:
        """Host memory of the messages, as far as there were any."""
        return sum(group.host_bytes for group in self._groups.values())

    def connect(self, group: Group) -> None:
        """Sends through another group from now on."""
        self._group = group
        self._groups.clear()
        self._sent, self._applied, self._received = [], [], []
        self._is_begun = False

    def layout(self) -> str:
        """Names what can be averaged; "" if there is nothing yet.

        Ranks average state only when all of them name the same layout.
        """
        names = [f"{index}:{name}" for index, name, _ in self._entries()]
        if not names:
            return ""
        return hashlib.sha256(",".join(names).encode()).hexdigest()[:16]

    def begin(self, weight: float) -> None:
        """Begins the mean, with all ranks; a rank of weight 0 sends zeros."""
        self._is_begun = False
        self._sent = [
            self._group_of(dtype, tensors)
            for dtype, tensors in self._by_dtype().items()
        ]
        for group in self._sent:
            group.send(weight)
        self._is_begun = True

    @property
    def is_summed(self) -> bool:
        """Whether all sums of a mean that was begun are here, and none is taken."""
        return self._is_begun and all(group.exchange.has_sum for group in self._sent)

    def wait(self) -> None:
        """Waits for all ranks.

        Raises:
            CommunicationError: it failed, or a rank did not arrive in time.
        """
        for group in self._sent:
            group.exchange.wait("averaging optimizer state")

    def apply(self) -> None:
        """After :meth:`wait`: the state becomes the mean."""
        for group in self._sent:
            group.replace()
        self._applied, self._sent, self._received = self._sent, [], []
        self._is_begun = False

    def receive(self, group: Group, source: int, *, lacks: bool) -> Means:
        """With all ranks of a new group: one rank's last mean; nothing changes yet.

        Args:
            group: the new group.
            source: place in it of a rank that has applied it.
            lacks: this rank has not.
        """
        means = self._lacking() if lacks else self._held()
        for _, mean in means:
            group.broadcast(mean, "handing over averaged optimizer state", source)
        return means

    def take_over(self, received: Means) -> None:
        """The state becomes the mean that was received."""
        self._applied, self._sent, self._received = [], [], received
        self._is_begun = False
        for layout, mean in received:
            image = layout.over(mean)
            for index in range(len(layout.segments)):
                layout.write(index, image)
            layout.flush(image)

    def _held(self) -> Means:
        """The last mean, from where it was summed or as it was received."""
        means = list(self._received)
        for each in self._applied:
            mean = _flat(each.layout)
            each.exchange.sum_into(0, each.layout.numel, mean)
            means.append((each.layout, mean))
        return means

    def _lacking(self) -> Means:
        """Room for one."""
        held = self._by_dtype().items()
        layouts = [FlatLayout(tensors, dtype) for dtype, tensors in held]
        return [(layout, _flat(layout)) for layout in layouts]

    def _by_dtype(self) -> dict[torch.dtype, list[torch.Tensor]]:
        """What can be averaged, by the dtype in which it travels."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for _, _, state in self._entries():
            by_dtype.setdefault(wire_dtype(state.dtype), []).append(state)
        return by_dtype

    def _group_of(
        self, dtype: torch.dtype, tensors: Sequence[torch.Tensor]
    ) -> _StateGroup:
        made = self._groups.get(dtype)
        if made is None or not made.layout.fits(tensors):
            made = self._groups[dtype] = _StateGroup(tensors, dtype, self._group)
        made.layout.tensors = list(tensors)
        return made

    def _entries(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Entries of parameters' states that are shaped like them, by index and name.

        In an order that does not depend on which of several optimizers stepped first,
        unless they step the same parameter.
        """
        optimizers = self._optimizers()
        for index, parameter in enumerate(self._parameters):
            states = (each.state.get(parameter) for each in optimizers)
            held: list[dict[str, Any]] = [state for state in states if state]
            for place, state in enumerate(held):
                for key in _keys(state, parameter):
                    yield index, f"{key}/{place}" if place else key, state[key]


def _flat(layout: FlatLayout) -> torch.Tensor:
    return torch.zeros(layout.numel, dtype=layout.dtype, device="cpu")


def _keys(state: dict[str, Any], parameter: nn.Parameter) -> list[str]:
    """What of a parameter's state is averaged."""
    return sorted(
        key
        for key, value in state.items()
        if key not in COUNTERS
        and isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.shape == parameter.shape
    )


@torch.no_grad()
def forget_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor] | None = None
) -> None:
    """Takes an optimizer back to where it had taken no step.

    Adagrad makes its state when it is made, and cannot step without it: its sums begin
    anew.

    Args:
        optimizer: the optimizer.
        parameters: whose state is meant; None for all there is.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if parameters is None:
        before = dict(optimizer.state)
        optimizer.state.clear()
    else:
        chosen = {id(parameter) for parameter in parameters}
        held = [p for p in held if id(p) in chosen]
        before = {p: optimizer.state.pop(p, {}) for p in held}
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    first = optimizer.defaults["initial_accumulator_value"]  # whatever a group says
    for parameter in held:
        state = before.get(parameter)
        if not state:  # of a group that was added: made at its first step
            continue
        state["step"].zero_()
        state["sum"].fill_(complex(first, first) if parameter.is_complex() else first)
        optimizer.state[parameter] = state
