"""Gradient reduction over ranks that hold the same parameters, during backward.

These are replicas of a pipeline, and stages that share a parameter. After a stage's
last weight gradient, its gradients are copied into flat buckets, whose all-reduces
start. The step ends when all sums have arrived. A replica without a batch adds zeros.

The buckets take the memory of one more copy of this rank's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

from torch import nn

from elche.comm.transport.process_group import Group
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.replicas.gradient_buckets import GradientBucket, make_buckets
from elche.pipeline.replicas.replica_units import Unit
from elche.pipeline.step.executor import StepInput, StepResults


@final
class _Line:
    """Units of one process group, which all its ranks reduce in the same order."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.units: list[tuple[tuple[int, ...], list[GradientBucket]]] = []
        self.begun = 0

    def begin(self, complete: set[int] | None) -> None:
        """Starts the units of complete stages, as far as the order allows.

        Args:
            complete: stages with complete gradients; None starts all units, with zeros.
        """
        has_batch = complete is not None
        for stages, buckets in self.units[self.begun :]:
            if complete is not None and not complete.issuperset(stages):
                return
            for bucket in buckets:
                bucket.begin(contributes=has_batch)
            self.begun += 1


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
        self._parameters = [parameters[name] for unit in units for name in unit.names]
        lines = {ranks: _Line(ranks) for ranks in groups if peers.rank in ranks}
        for unit in units:
            mine = [parameters[name] for name in unit.names]
            stages = unit.stages_on(peers.rank)
            made = make_buckets(mine, groups[unit.ranks])
            lines[unit.ranks].units.append((stages, made))
        self._lines = list(lines.values())
        self.copies = frozenset(
            id(parameters[name])
            for unit in units
            for name in unit.names
            if unit.ranks[0] != peers.rank
        )
        self._complete: set[int] = set()

    def stage_is_through(self, stage: int) -> None:
        """Marks a stage's gradients as complete, and starts the units that need them.

        Raises:
            ConfigError: a gradient cannot be summed.
            CommunicationError: a connection has failed.
        """
        self._complete.add(stage)
        for line in self._lines:
            line.begin(self._complete)

    def run(
        self,
        carry_out: Callable[[StepInput], StepResults],
        given: StepInput,
        has_batch: bool,
    ) -> StepResults:
        """Carries out this rank's part of a step and replaces the gradients by sums.

        Gradients from before the step are added, and not summed again.

        Args:
            carry_out: calls :meth:`stage_is_through` for each stage.
            given: input of `carry_out`.
            has_batch: whether this replica has a batch; otherwise it only adds zeros.

        Raises:
            DeadlineError: a rank was late for a sum.
            CommunicationError: a connection has failed. Others as `carry_out` raises.
        """
        earlier = [one.grad for one in self._parameters]
        for one in self._parameters:
            one.grad = None
        self._complete = set()
        results = StepResults()
        for line in self._lines:
            line.begun = 0
            if not has_batch:
                line.begin(None)
        if has_batch:
            results = carry_out(given)
        self._take_sums(given.timeout_s)
        for one, before in zip(self._parameters, earlier, strict=True):
            if before is not None:
                one.grad = before if one.grad is None else before + one.grad
        return results

    def _take_sums(self, timeout_s: float) -> None:
        """Waits for all sums; then writes them into the gradients."""
        buckets = []
        for line in self._lines:
            for stages, mine in line.units:
                named = " and ".join(map(str, stages))
                what = f"the sum of the gradients of stage {named}"
                for one in mine:
                    poll, end = one.exchange.poll, partial(one.exchange.wait, what)
                    self._peers.wait(poll, end, line.ranks, what, timeout_s)
                buckets += mine
        for one in buckets:
            one.write()
