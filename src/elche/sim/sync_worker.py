"""An epoch under ``sync`` on a simulated rank. Pure.

A step's forward pass takes a third of its time, its backward pass the rest; gradients
appear during backward, bucket by bucket, and are reduced as soon as all ranks have
them. So a step ends when the reduction could have ended that began with the last rank's
backward pass, and not before the last bucket of the last rank is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.protocol.events import WindowReduced
from elche.coordination.protocol.instructions import (
    Adopt,
    BeginEpoch,
    EndEpoch,
    GrantSteps,
    Instruction,
    JoinPasses,
    LeaveOut,
    MetricsReported,
    PolicyChosen,
    RankLeft,
    Regroup,
    SwitchPolicy,
)
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.coordination.sync.step_reports import StepReports
from elche.sim.engine import Collective, Receive, Script
from elche.sim.history import DATA, LEASE, REDUCTION, REGROUP, WINDOW_END
from elche.sim.simulated_loader import Loaded, Loader

if TYPE_CHECKING:
    from elche.sim.rank import Rank

FORWARD_PART = 1.0 / 3.0
BYTES_PER_MIB = 2**20
NOTHING = BatchCost(samples=0, busy_s=0.0, data_wait_s=0.0)


class SimulatedSyncEpoch:
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
        self._reports = StepReports(rank.rank, begin.epoch, NonFiniteRecord())
        self._end: EndEpoch | None = None
        self._regroup: Regroup | None = None
        self._adopt: Adopt | None = None
        self._has_changed = False
        self.switch: SwitchPolicy | None = None
        self.later: list[Instruction] = []
        rank.reduced = -1

    def train(self) -> Script:
        """The epoch, to its end."""
        rank = self._rank
        break_at = self._sim.break_at(rank.rank, self._epoch)
        while True:
            rank.take_all(self._handle)
            if self._regroup is not None:
                yield from self._reform(self._regroup)
            elif self._adopt is not None:
                yield from self._take_over(self._adopt)
            elif self._has_changed:
                yield from self._join_others()
            elif self._end is not None:
                break
            elif self.switch is not None and self.switch.step <= rank.reduced + 1:
                self._report()
                return
            elif not self._loader.has_work:
                yield from self._wait()
            elif (done := (yield from self._take_step())) is not None:
                item, cost = done
                self._trained(item)
                if item.number + 1 == break_at:
                    yield from self._leave(break_at, cost)
                    break
                self._account(item.number, cost)
        if rank.is_back:
            rank.goes_on()
        self._sim.epoch_ended(rank.run, self._epoch, rank.rank)

    def _leave(self, step: int, cost: BatchCost) -> Script:
        """The loop has broken off; takes part with nothing in what is granted.

        A real rank does so only in what the others have begun; here nobody waits for
        an arrival that is for nothing.
        """
        self._report()
        left = self._reports.left(step, cost, (), passes=step)
        self._sim.send(left)
        self._pass_over(step - 1)
        while self._end is None:
            if self._adopt is not None:
                yield from self._take_over(self._adopt)
                continue
            while self._loader.has_work:
                item = self._loader.take(self._rank.now_s)
                self._arrive(item, self._rank.now_s)
                self._pass_over(item.number)
            yield Receive("the other ranks to end the epoch")
            self._rank.take_all(self._handle)

    def _pass_over(self, number: int) -> None:
        """A step is over that this rank does not report."""
        if self._reports.step_done(number, NOTHING):
            self._reports.close(backward_passes=0)
            self._reports.take()

    def _trained(self, item: Loaded) -> None:
        """Notes this rank's part of a step."""
        rank = self._rank
        start = self._start()
        rank.trained(self._epoch, item.number, start, start + item.counted)
        rank.history.samples += item.counted
        rank.history.windows += rank.rank == 0

    def _start(self) -> int:
        """Where this rank's part of the step under way begins."""
        grant = self._reports.under_way
        assert grant is not None
        return sum(grant.shares[: self._rank.rank])

    def _wait(self) -> Script:
        """Nothing is granted: the end of the epoch, or a change of the membership."""
        rank, began_s = self._rank, self._rank.now_s
        number = rank.reduced + 1
        self._report()
        yield Receive(f"the grant of step {number} of {rank.sizes.num_batches}")
        is_over = number == rank.sizes.num_batches
        cause = WINDOW_END if is_over else LEASE
        rank.history.wait(rank.rank, cause, began_s, rank.now_s)

    def _take_step(self) -> Generator[Any, Any, tuple[Loaded, BatchCost] | None]:
        """Runs this rank's part of the next step; None: the group has changed."""
        rank = self._rank
        if rank.is_back:
            rank.goes_on()
        item = self._loader.take(rank.now_s)
        began_s = rank.now_s
        if item.ready_s > began_s:
            yield item.ready_s - began_s
            cause = LEASE if item.was_late else DATA
            rank.history.wait(rank.rank, cause, began_s, rank.now_s)
        data_wait_s = rank.now_s - began_s
        compute_s, is_warm = rank.compute_s(item.samples)
        began_s = rank.now_s
        forward_s = FORWARD_PART * compute_s
        if self._reports.is_due:
            yield forward_s
            self._report()  # beneath the backward pass, which now begins
            rank.take_all(self._handle)
            yield compute_s - forward_s
        else:
            yield compute_s
        rank.sums.compute_s += compute_s
        rank.sums.load_s += item.load_s
        rank.history.batch(rank.rank, f"step {item.number}", began_s, rank.now_s)
        ended_s = rank.now_s
        if not (yield from self._reduce(item, began_s + forward_s)):
            yield from self._await_regroup()
            return None
        return item, BatchCost(
            samples=item.counted,
            busy_s=data_wait_s + compute_s,
            data_wait_s=data_wait_s,
            sync_wait_s=rank.now_s - ended_s,
            is_timed=is_warm,
        )

    def _reduce(self, item: Loaded, ready_s: float) -> Generator[Any, Any, bool]:
        """The step's reduction; False: a rank is gone, and it has failed."""
        rank, ended_s = self._rank, self._rank.now_s
        collective = self._arrive(item, ready_s)
        if not (yield collective):
            return False
        if self._sim.books is not None:
            self._sim.books[rank.run].took_step(
                rank.rank,
                (self._epoch, *rank.sizes.part_of(item.number)),
                collective.value,
                rank.sizes.run_of(item.number)[0],
            )
        rank.reduced = item.number
        last_s = max(ended_s, min(rank.now_s, collective.last_arrival_s))
        rank.history.wait(rank.rank, WINDOW_END, ended_s, last_s)
        rank.history.wait(rank.rank, REDUCTION, last_s, rank.now_s)
        return True

    def _arrive(self, item: Loaded, ready_s: float) -> Collective:
        rank = self._rank
        collective = rank.engine.arrive_ready(
            ("step", rank.run, rank.generation, self._epoch, item.number),
            rank.rank,
            self._new,
            ready_s,
        )
        collective.value[rank.rank] = self._start(), item.counted
        return collective

    def _await_regroup(self) -> Script:
        """A rank is gone; the coordinator says who goes on, or ends the run."""
        rank, began_s = self._rank, self._rank.now_s
        rank.take_all(self._handle)
        while self._regroup is None:
            yield Receive("the ranks that stay to be named")
            rank.take_all(self._handle)
        rank.history.wait(rank.rank, REGROUP, began_s, rank.now_s)

    def _reform(self, regroup: Regroup) -> Script:
        """Forms the new group. What was granted in the old one is void."""
        self._regroup = None
        self._report()
        self._reports.void()
        self._loader.discard()
        if not (yield from self._rank.regroup(regroup, self._epoch)):
            yield from self._await_regroup()

    def _join_others(self) -> Script:
        """Forms the group of those who are not left out, and finds its buckets."""
        rank, began_s, self._has_changed = self._rank, self._rank.now_s, False
        if rank.rank in rank.left_out:
            return
        key = "left out", rank.run, rank.generation, self._epoch, rank.reduced
        formed = yield rank.engine.arrive(
            (*key, rank.left_out),
            rank.rank,
            lambda: Collective(self._members, self._sim.cluster.run.regroup_s),
        )
        rank.history.wait(rank.rank, REGROUP, began_s, rank.now_s)
        if not formed:
            yield from self._await_regroup()

    @property
    def _members(self) -> frozenset[int]:
        """Ranks that take part in steps."""
        return self._sim.groups[self._rank.generation] - self._rank.left_out

    def _take_over(self, adopt: Adopt) -> Script:
        """Takes the model of the rank that has taken most steps, with all ranks."""
        rank, began_s = self._rank, self._rank.now_s
        self._adopt = None
        members = self._sim.groups[rank.generation]
        link, run = rank.engine.link, self._sim.cluster.run
        taken = yield rank.engine.arrive(
            ("adopt step", rank.run, rank.generation, self._epoch, adopt.window),
            rank.rank,
            lambda: Collective(
                members, link.broadcast_s(run.model_bytes, len(members))
            ),
        )
        rank.history.wait(rank.rank, REGROUP, began_s, rank.now_s)
        if not taken:
            yield from self._await_regroup()
            return
        if self._sim.books is not None:
            self._sim.books[rank.run].take_steps(rank.rank, adopt.source)
        rank.reduced = adopt.window
        self._sim.send(
            WindowReduced(
                rank=rank.rank,
                epoch=self._epoch,
                window=adopt.window,
                sync_s=rank.now_s - began_s,
                wait_s=0.0,
                divergence=0.0,
                adopted_at=0,
            )
        )

    def _new(self) -> Collective:
        run, config = self._sim.cluster.run, self._sim.cluster.run.config
        members = self._members
        bucket_bytes = config.transport.bucket_cap_mb * BYTES_PER_MIB
        buckets = max(1, math.ceil(run.model_bytes / bucket_bytes))
        cost_s = self._rank.engine.link.reduce_s(run.model_bytes, len(members))
        collective = Collective(members, cost_s, buckets)
        collective.value = {}
        return collective

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
        if isinstance(instruction, Regroup):
            self._regroup, self._adopt = instruction, None
            rank.left_out, self._has_changed = frozenset(), False
            return
        if isinstance(instruction, Adopt):
            self._adopt = instruction
            return
        if isinstance(instruction, LeaveOut):
            left_out = frozenset(instruction.left_out)
            self._has_changed = left_out != rank.left_out
            rank.left_out = left_out
            return
        if isinstance(
            instruction, (MetricsReported, PolicyChosen, RankLeft, JoinPasses)
        ):
            return
        assert isinstance(instruction, GrantSteps), instruction
        self._reports.granted(instruction)
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

    def _account(self, number: int, cost: BatchCost) -> None:
        """A step is done; a grant's report waits for the next one's backward pass."""
        self._report()  # of a membership that has taken no step since
        grant = self._reports.under_way
        if self._reports.step_done(number, cost):
            assert grant is not None
            self._reports.close(backward_passes=grant.stop)

    def _report(self) -> None:
        """Says what is still to be said."""
        event = self._reports.take()
        if event is not None:
            self._sim.send(event)
