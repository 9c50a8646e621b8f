"""Gradient reduction over ranks that hold the same parameters, during backward.

Such ranks are replicas of a pipeline, and stages that share a parameter. After a
stage's last weight gradient, its gradients are copied into flat messages and their
all-reduces start. The step ends when all sums have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, final

from torch import nn

from elche.comm.gradients.gradient_messages import GradientMessage, make_messages
from elche.comm.transport.process_group import Group
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.replicas.replica_units import Unit
from elche.pipeline.step.executor import StepInput, StepResults

_Waiting: TypeAlias = "deque[tuple[tuple[int, ...], list[GradientMessage]]]"
"""Unstarted units of a process group: their stages and messages."""


@final
class GradientReduction:
    """Sums this rank's gradients over the replicas; see the module.

    Args:
        units: units that this rank holds, in the common order.
        parameters: this rank's parameters, by the units' names.
        groups: process groups by ranks of the units.
        peers: connections to all ranks.

    Attributes:
        copies: ids of the parameters that a lower rank also holds.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[tuple[int, ...], Group],
        peers: StagePeers,
    ) -> None:
        self._peers = peers
        self._units = []
        self._parameters: list[nn.Parameter] = []
        copies: set[int] = set()
        for unit in units:
            mine = [parameters[name] for name in unit.names]
            made = make_messages(mine, groups[unit.ranks])
            self._units.append((unit, made))
            self._parameters += mine
            copies |= {id(one) for one in mine if unit.ranks[0] != peers.rank}
        self.copies = frozenset(copies)
        self._waiting: list[_Waiting] = []
        self._complete: set[int] = set()

    def stage_is_through(self, stage: int) -> None:
        """Marks a stage's gradients as complete, and starts the units that need them.

        All ranks of a process group reduce its units in the same order. Raises as
        `GradientMessage.begin` does.
        """
        self._complete.add(stage)
        for waiting in self._waiting:
            while waiting and self._complete.issuperset(waiting[0][0]):
                for message in waiting.popleft()[1]:
                    message.begin(1.0)

    def run(
        self,
        carry_out: Callable[[StepInput], StepResults],
        given: StepInput,
        has_batch: bool,
    ) -> StepResults:
        """Executes this rank's part of a step and replaces its gradients by sums.

        Gradients from before the step are kept: the sums are added to them. A replica
        without a batch only contributes zeros.

        Raises:
            DeadlineError: a rank was late for a sum.
            CommunicationError: a connection has failed. Others as `carry_out` raises.
        """
        earlier = [one.grad for one in self._parameters]
        for one in self._parameters:
            one.grad = None
        self._complete, results = set(), StepResults()
        if has_batch:
            lines: dict[tuple[int, ...], _Waiting] = {}
            for unit, messages in self._units:
                line = lines.setdefault(unit.ranks, deque())
                line.append((unit.stages_on(self._peers.rank), messages))
            self._waiting = list(lines.values())
            results = carry_out(given)
        else:
            for message in (one for _, some in self._units for one in some):
                message.begin(0.0)
        self._take_sums(given.timeout_s)
        for one, before in zip(self._parameters, earlier, strict=True):
            if before is not None:
                one.grad = before if one.grad is None else before + one.grad
        return results

    def _take_sums(self, timeout_s: float) -> None:
        """Waits for all sums; then writes them into the gradients."""
        for unit, messages in self._units:
            named = " and ".join(map(str, unit.stages_on(self._peers.rank)))
            what = f"the sum of the gradients of stage {named}"
            for one in messages:
                poll, end = one.exchange.poll, partial(one.exchange.wait, what)
                self._peers.wait(poll, end, unit.ranks, what, timeout_s)
        for one in (one for _, some in self._units for one in some):
            one.write()
