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

    @property
    def host_bytes(self) -> int:
        """Host memory of the messages, as far as there were any."""
        return sum(group.host_bytes for group in self._groups.values())

    def connect(self, group: Group) -> None:
        """Sends through another group from now on."""
        self._group = group
        self._groups.clear()

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
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for _, _, state in self._entries():
            by_dtype.setdefault(wire_dtype(state.dtype), []).append(state)
        self._sent = [
            self._group_of(dtype, tensors) for dtype, tensors in by_dtype.items()
        ]
        for group in self._sent:
            group.send(weight)

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
        self._sent = []

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
