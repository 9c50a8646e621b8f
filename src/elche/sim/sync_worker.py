"""An epoch under ``sync`` as a simulated rank runs it. Pure.

A step's forward pass takes a third of its time, its backward pass the rest; gradients
appear during backward, bucket by bucket, and are reduced as soon as all ranks have
them. So a step ends when the reduction could have ended that began with the last rank's
backward pass, and not before the last bucket of the last rank is reduced.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from elche.coordination.messages import (
    BeginEpoch,
    EndEpoch,
    EpochLeft,
    GrantSteps,
    Instruction,
    MetricsReported,
    PolicyChosen,
    StepsDone,
    SwitchPolicy,
)
from elche.sim.engine import Collective, Receive, Script
from elche.sim.history import DATA, LEASE, REDUCTION, WINDOW_END
from elche.sim.loader import Loaded, Loader

if TYPE_CHECKING:
    from elche.sim.rank import Rank

FORWARD_PART = 1.0 / 3.0
BYTES_PER_MIB = 2**20


class SyncEpoch:
    """Trains on this rank's share of every global batch.

    Ends early, with ``switch`` set, where windows take over (``auto``); instructions
    that came after that are ``later``.

    Args:
        rank: whose epoch.
        begin: the coordinator's word that it begins.
    """

    def __init__(self, rank: Rank, begin: BeginEpoch) -> None:
        self._rank = rank
        self._sim = rank.sim
        self._epoch = begin.epoch
        self._loader = Loader(rank.device.load_seconds_per_sample, rank.device.prefetch)
        self._grants: deque[GrantSteps] = deque()
        self._granted_until = 0
        self._end: EndEpoch | None = None
        self.switch: SwitchPolicy | None = None
        self.later: list[Instruction] = []
        self.steps_done = 0
        self._measured = [0.0, 0.0, 0.0, 0.0]
        self._is_warm = True

    def train(self) -> Script:
        """The epoch, to its end."""
        rank = self._rank
        break_at = self._sim.break_at(rank.rank, self._epoch)
        for number in range(rank.sizes.num_batches):
            item = yield from self._next(number)
            if item is None:
                return
            yield from self._step(item)
            if number + 1 == break_at:
                self._trained(item)
                self._sim.send(
                    EpochLeft(rank=rank.rank, epoch=self._epoch, step=number + 1)
                )
                return
            self._trained(item)
            self._account(number)
        began_s = rank.now_s
        while self._end is None:
            yield Receive("the end of the epoch")
            rank.take_all(self._handle)
        rank.history.wait(rank.rank, WINDOW_END, began_s, rank.now_s)
        rank.history.ended[rank.run, self._epoch].add(rank.rank)

    def _trained(self, item: Loaded) -> None:
        """Notes this rank's part of a step."""
        rank, grant = self._rank, self._grants[0]
        start = sum(grant.shares[: rank.rank])
        rank.trained(self._epoch, item.number, start, start + item.counted)
        self.steps_done += 1
        rank.history.samples += item.counted
        rank.history.windows += rank.rank == 0

    def _next(self, number: int) -> Generator[Any, Any, Loaded | None]:
        """This rank's part of a step; None: windows have taken over."""
        rank, began_s = self._rank, self._rank.now_s
        rank.take_all(self._handle)
        while self._granted_until <= number and self.switch is None:
            yield Receive(f"the grant of step {number}")
            rank.take_all(self._handle)
        rank.history.wait(rank.rank, LEASE, began_s, rank.now_s)
        if self.switch is not None and self.switch.step <= number:
            return None
        item = self._loader.take(rank.now_s)
        began_s = rank.now_s
        if item.ready_s > began_s:
            yield item.ready_s - began_s
            cause = LEASE if item.was_late else DATA
            rank.history.wait(rank.rank, cause, began_s, rank.now_s)
        self._measured[2] += rank.now_s - began_s
        self._measured[1] += rank.now_s - began_s
        return item

    def _step(self, item: Loaded) -> Script:
        rank, number = self._rank, item.number
        compute_s, is_warm = rank.compute_s(item.samples)
        began_s = rank.now_s
        yield compute_s
        rank.sums.compute_s += compute_s
        rank.sums.load_s += item.load_s
        rank.history.batch(rank.rank, f"step {number}", began_s, rank.now_s)
        ready_s = began_s + FORWARD_PART * compute_s
        self._measured[0] += item.counted
        self._measured[1] += compute_s
        self._is_warm &= is_warm
        ended_s = rank.now_s
        collective = rank.engine.arrive_ready(
            ("step", rank.run, self._epoch, number), rank.rank, self._new, ready_s
        )
        if not (yield collective):
            while True:  # a rank is gone: the coordinator ends the run
                yield Receive("the reason of the failure")
                rank.take_all(self._handle)
        last_s = max(ended_s, min(rank.now_s, collective.last_arrival_s))
        rank.history.wait(rank.rank, WINDOW_END, ended_s, last_s)
        rank.history.wait(rank.rank, REDUCTION, last_s, rank.now_s)
        self._measured[3] += rank.now_s - ended_s

    def _new(self) -> Collective:
        run, config = self._sim.cluster.run, self._sim.cluster.run.config
        members = self._sim.groups[self._rank.generation]
        bucket_bytes = config.bucket_cap_mb * BYTES_PER_MIB
        buckets = max(1, math.ceil(run.model_bytes / bucket_bytes))
        cost_s = self._rank.engine.link.reduce_s(run.model_bytes, len(members))
        return Collective(members, cost_s, buckets)

    def _handle(self, instruction: Instruction) -> None:
        rank = self._rank
        if self.switch is not None:
            self.later.append(instruction)
            return
        if isinstance(instruction, SwitchPolicy):
            self.switch = instruction
            return
        if isinstance(instruction, EndEpoch):
            self._end = instruction
            return
        if isinstance(instruction, (MetricsReported, PolicyChosen)):
            return
        assert isinstance(instruction, GrantSteps), instruction
        self._grants.append(instruction)
        shares, counted = instruction.shares, instruction.shares[rank.rank]
        few = min(self._sim.cluster.run.min_share_samples, sum(shares))
        steps = range(instruction.start, instruction.stop)
        if rank.history.has_details:
            for step in steps:
                assert sum(shares) == rank.sizes.run_of(step)[0]
                rank.history.shares[rank.run, self._epoch, step].add(shares)
        self._loader.push(
            (Loaded(step, counted or few, counted) for step in steps), rank.now_s
        )
        self._granted_until = instruction.stop

    def _account(self, number: int) -> None:
        """Reports a grant when its last step is done."""
        if number + 1 != self._grants[0].stop:
            return
        grant = self._grants.popleft()
        samples, busy_s, data_wait_s, sync_wait_s = self._measured
        self._sim.send(
            StepsDone(
                rank=self._rank.rank,
                epoch=self._epoch,
                start=grant.start,
                stop=grant.stop,
                samples=int(samples),
                busy_s=busy_s,
                data_wait_s=data_wait_s,
                sync_wait_s=sync_wait_s,
                warm=self._is_warm,
                backward_passes=grant.stop,
            )
        )
        self._measured = [0.0, 0.0, 0.0, 0.0]
        self._is_warm = True
