"""Gradient reduction over ranks that hold the same parameters, beside backward.

These are the replicas of a pipeline, and stages that share a parameter. When the last
weight gradient of a stage has run, its gradients go into flat buckets, whose sums
begin; the step ends when all sums are there. A replica without a batch sends zeros. A
rank that fails in a step sends zeros for all that it has not sent yet, so that the
others complete their sums, and the next step is a new one.

The buckets are one more copy of this rank's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

from torch import nn

from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, RemoteRankError
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.replicas.gradient_buckets import GradientBucket, make_buckets
from elche.pipeline.replicas.replica_units import Unit
from elche.pipeline.step.step_io import StepInput, StepResults


@final
class _Line:
    """The units that one process group sums, which all its ranks begin in one order."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.units: list[tuple[tuple[int, ...], list[GradientBucket]]] = []
        self.begun = 0
        self._under_way: list[tuple[tuple[int, ...], GradientBucket]] = []

    def begin_complete(self, complete: set[int], contributes: bool) -> None:
        """Begins those that are complete, as far as the order allows."""
        while self.begun < len(self.units):
            stages, buckets = self.units[self.begun]
            if contributes and not complete.issuperset(stages):
                return
            # Counted bucket by bucket: one that fails is begun again, with zeros.
            done = [bucket for _, bucket in self._under_way]
            for bucket in buckets:
                if bucket not in done:
                    bucket.begin(contributes)
                    self._under_way.append((stages, bucket))
            self.begun += 1

    def take(self) -> list[tuple[tuple[int, ...], GradientBucket]]:
        """Buckets whose reduction has begun, in order; the next step begins anew."""
        taken, self._under_way, self.begun = self._under_way, [], 0
        return taken


@final
class GradientReduction:
    """This rank's part in summing gradients over the replicas; see the module.

    Args:
        units: those that this rank holds, in the common order.
        parameters: this rank's, by the units' names.
        groups: of the units' ranks.
        peers: all ranks.

    Attributes:
        copies: ids of the parameters that a lower rank holds, too.
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
        self._lines = {ranks: _Line(ranks) for ranks in groups if peers.rank in ranks}
        for unit in units:
            mine = [parameters[name] for name in unit.names]
            stages = unit.stages_on(peers.rank)
            made = make_buckets(mine, groups[unit.ranks])
            self._lines[unit.ranks].units.append((stages, made))
        self.copies = frozenset(
            id(parameters[name])
            for unit in units
            for name in unit.names
            if unit.ranks[0] != peers.rank
        )
        self._complete: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of each step's messages."""
        return sum(
            bucket.nbytes
            for line in self._lines.values()
            for _, buckets in line.units
            for bucket in buckets
        )

    def stage_is_through(self, stage: int) -> None:
        """The last weight gradient of a stage has run; begins what waited for it.

        Raises:
            ConfigError: a gradient cannot be summed.
            CommunicationError: a connection has failed.
        """
        self._complete.add(stage)
        for line in self._lines.values():
            line.begin_complete(self._complete, True)

    def run(
        self,
        carry_out: Callable[[StepInput], StepResults],
        given: StepInput,
        has_batch: bool,
    ) -> StepResults:
        """Carries out this rank's part of a step; then the gradients are the sums.

        Gradients that were there before are added, and not summed again.

        Args:
            carry_out: calls :meth:`stage_is_through` for each stage.
            given: for it.
            has_batch: whether this replica has one; without, only its part in the
                sums is done.

        Raises:
            DeadlineError: a rank did not come to a sum in time.
            CommunicationError: a connection has failed. Others are `carry_out`'s.
        """
        earlier = [one.grad for one in self._parameters]
        for one in self._parameters:
            one.grad = None
        self._complete = set()
        try:
            results = carry_out(given) if has_batch else StepResults()
            self._begin_rest(has_batch)
        except (CommunicationError, RemoteRankError):
            raise
        except Exception:
            self._begin_rest(False)
            for bucket in self._wait(given.timeout_s):
                bucket.exchange.release()
            for one, before in zip(self._parameters, earlier, strict=True):
                one.grad = before
            raise
        for bucket in self._wait(given.timeout_s):
            bucket.write()
        for one, before in zip(self._parameters, earlier, strict=True):
            if before is not None:
                one.grad = before if one.grad is None else before.add_(one.grad)
        return results

    def _begin_rest(self, contributes: bool) -> None:
        every = {s for line in self._lines.values() for of, _ in line.units for s in of}
        for line in self._lines.values():
            line.begin_complete(every, contributes)

    def _wait(self, timeout_s: float) -> list[GradientBucket]:
        """Waits for all sums, those that began first first."""
        under_way = [
            (bucket, stages, line)
            for line in self._lines.values()
            for stages, bucket in line.take()
        ]
        for bucket, stages, line in sorted(under_way, key=lambda one: one[0].begin_s):
            named = " and ".join(map(str, stages))
            what = f"the sum of the gradients of stage {named}"
            poll, end = bucket.exchange.poll, partial(bucket.exchange.wait, what)
            self._peers.wait(poll, end, line.ranks, what, timeout_s)
        return [bucket for bucket, *_ in under_way]
