"""An epoch under ``sync`` on a simulated rank. Pure.

A step's forward pass takes a third of its time, its backward pass the rest. Gradients
appear during backward, bucket by bucket, and are reduced as soon as all ranks have
them. So a step's reduction begins in the last rank's backward pass, and the step ends
when that rank's last bucket is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.protocol.events import ModelUpdated
from elche.coordination.protocol.instructions import (
    Adopt,
    BeginEpoch,
    EndEpoch,
    GrantBatches,
    Instruction,
    JoinPasses,
    LeaveOut,
    MetricsReported,
    PolicyChosen,
    RankLeft,
    Regroup,
)
from elche.coordination.sync.lost_ranks import LostRanks, StepPlace, settle
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.coordination.sync.step_reports import StepReports
from elche.sim.engine import Collective, Receive, Script
from elche.sim.history import LEASE, LEFT_OUT, REDUCTION, REGROUP, WINDOW_END
from elche.sim.rank import CANNOT_GO_ON, Rank
from elche.sim.simulated_loader import Loaded, Loader

BYTES_PER_MIB = 2**20
PASSED_OVER = (MetricsReported, PolicyChosen, RankLeft, JoinPasses)
NOTHING = BatchCost(samples=0, busy_s=0.0, data_wait_s=0.0)


@dataclass(slots=True)
class _Computed:
    """A step whose share this rank has computed.

    Attributes:
        item: the step.
        ready_s: time when its first gradients, or a new group for them, were ready.
        ended_s: time when all its gradients were ready.
        cost: cost so far.
    """

    item: Loaded
    ready_s: float
    ended_s: float
    cost: BatchCost


class SimulatedSyncEpoch:
    """Trains this rank's share of every global batch of an epoch, or a part of it.

    Args:
        rank: the training rank.
        begin: the coordinator's instruction that begins it.
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
        self._has_changed = self._has_reported = False
        self._current: _Computed | None = None
        self._members_before = rank.sim.groups[rank.generation]
        self._lost = LostRanks()
        self._break_at = rank.sim.break_at(rank.rank, begin.epoch)
        rank.reduced = -1

    def train(self) -> Generator[Any, Any, EndEpoch]:
        """Trains to the end of the epoch or part."""
        rank = self._rank
        while True:
            rank.take_all(self._handle)
            if self._adopt is not None:
                yield from self._copy_model(self._adopt)
            elif self._regroup is not None and self._end is None:
                yield from self._reform(self._regroup)
            elif self._has_changed:
                yield from self._join_others()
            elif self._end is not None:
                break
            elif self._current is not None:
                yield from self._reduce(self._current)
            elif self._is_over or not self._loader.has_work:
                yield from self._wait()
            else:
                yield from self._compute()
        if self._lost.is_settled:
            rank.excluded = frozenset()
        if self._regroup is not None:
            self._sim.engine.processes[rank.rank].inbox.appendleft(self._regroup)
        elif rank.is_back:
            rank.note_recovery()
        return self._end

    @property
    def _is_over(self) -> bool:
        """True if this rank runs no more steps of the epoch because of deaths."""
        return self._rank.reduced + 1 > self._lost.last

    def _leave(self, cost: BatchCost) -> Script:
        """Leaves the epoch early; takes part in granted steps with zeros.

        A real rank takes part only in steps that others have begun. In the simulator
        an unneeded arrival delays no rank.
        """
        self._report()
        step = self._rank.reduced + 1
        left = self._reports.left(step, cost, (), passes=step)
        self._sim.send(left)
        self._pass_over(step - 1)
        while self._end is None:
            if self._adopt is not None:
                yield from self._copy_model(self._adopt)
                continue
            while self._loader.has_work:
                item = self._loader.take(self._rank.now_s)
                self._arrive(item, self._rank.now_s)
                self._pass_over(item.number)
            yield Receive("the other ranks to end the epoch")
            self._rank.take_all(self._handle)

    def _pass_over(self, number: int) -> None:
        """Skips a finished step that this rank does not report."""
        if self._reports.step_done(number, NOTHING):
            self._reports.close(backward_passes=0)
            self._reports.take()

    def _wait(self) -> Script:
        """Waits for a grant, the end of the epoch, or a membership change."""
        rank, began_s = self._rank, self._rank.now_s
        number, is_excluded = rank.reduced + 1, rank.rank in rank.excluded
        self._report()
        if self._is_over and not (self._has_reported or is_excluded):
            self._has_reported = True
            self._report_model(number - 1, 0.0)
        yield Receive(f"the grant of step {number} of {rank.sizes.num_batches}")
        is_over = self._is_over or number == rank.sizes.num_batches
        cause = LEFT_OUT if is_excluded else WINDOW_END if is_over else LEASE
        rank.history.wait(rank.rank, cause, began_s, rank.now_s)

    def _compute(self) -> Script:
        rank = self._rank
        if rank.is_back:
            rank.note_recovery()
        item = self._loader.take(rank.now_s)
        due = self._report_in_backward if self._reports.due else None
        cost = yield from rank.run_batch(item, f"step {item.number}", due)
        self._current = _Computed(item, rank.gradients_s, rank.now_s, cost)

    def _report_in_backward(self) -> None:
        """Sends the pending report during backward; handles received instructions."""
        self._report()
        self._rank.take_all(self._handle)

    def _reduce(self, step: _Computed) -> Script:
        """Reduces the current step; if a rank dies first, the step stays current."""
        rank, began_s = self._rank, self._rank.now_s
        collective = self._arrive(step.item, step.ready_s)
        if not (yield collective):
            yield from rank.await_regroup(self._handle)
            return
        if books := rank.books:
            books.took_step(rank.rank, self._epoch, collective.value.values())
        last_s = max(began_s, min(rank.now_s, collective.last_arrival_s))
        rank.history.wait(rank.rank, WINDOW_END, began_s, last_s)
        rank.history.wait(rank.rank, REDUCTION, last_s, rank.now_s)
        self._took(step)
        if step.item.number + 1 == self._break_at:
            yield from self._leave(step.cost)
        else:
            self._account(step.item.number, step.cost)

    def _took(self, step: _Computed) -> None:
        """Records that the current step is in the model."""
        rank, self._current = self._rank, None
        rank.reduced = step.item.number
        step.cost.sync_wait_s = rank.now_s - step.ended_s

    def _arrive(self, item: Loaded, ready_s: float) -> Collective:
        rank = self._rank
        collective = rank.engine.arrive(
            ("step", rank.run, rank.generation, self._epoch, item.number),
            rank.rank,
            self._new,
            ready_s,
        )
        collective.value[rank.rank] = item.parts
        is_whole = len(collective.arrived) == len(collective.members)
        rank.history.windows += is_whole
        return collective

    def _reform(self, regroup: Regroup) -> Script:
        """Forms the next group, whose members agree on the steps to run."""
        rank, self._regroup = self._rank, None
        self._report()
        self._reports.void()
        passes, place = rank.reduced + 1, None
        if rank.rank not in rank.excluded:
            begun = passes if self._current is not None else rank.reduced
            place = StepPlace(passes, first=passes, begun=begun)
        sent = yield from rank.regroup(regroup, place)
        if sent is None or not (yield from self._settle(sent)):
            yield from rank.await_regroup(self._handle)
            return
        self._lost.confirm()
        self._has_reported = False
        rank.report_regrouped(self._lost.last, self._lost.to_wire())

    def _settle(self, sent: dict[int, StepPlace | None]) -> Generator[Any, Any, bool]:
        """Agrees on the last step; ranks that lack its sums copy them."""
        rank = self._rank
        places = {each: sent[each] for each in sorted(sent)}
        there = {each: at for each, at in places.items() if at is not None}
        found = settle([*there.values()])
        self._lost.take(self._members_before - sent.keys(), found)
        if found.source is not None:
            source = [*there][found.source]
            if not (yield from rank.broadcast("sums", source)):
                return False
            place = there.get(rank.rank)
            if place is not None and place.passes < found.passes:
                assert self._current is not None
                if books := rank.books:
                    books.take_steps(rank.rank, source)
                self._took(self._current)
        if self._current is not None:
            self._current.ready_s = rank.now_s  # all gradients are sent again
        return True

    def _join_others(self) -> Script:
        """Forms the group of the active ranks after an exclusion has changed."""
        rank, began_s, self._has_changed = self._rank, self._rank.now_s, False
        if rank.rank in rank.excluded:
            return
        key = "left out", rank.run, rank.generation, self._epoch, rank.reduced
        formed = yield rank.engine.arrive(
            (*key, rank.excluded),
            rank.rank,
            lambda: Collective(self._members, self._sim.cluster.run.regroup_s),
        )
        rank.history.wait(rank.rank, REGROUP, began_s, rank.now_s)
        if not formed:
            yield from rank.await_regroup(self._handle)

    @property
    def _members(self) -> frozenset[int]:
        """Ranks that take part in steps."""
        return self._sim.groups[self._rank.generation] - self._rank.excluded

    def _copy_model(self, adopt: Adopt) -> Script:
        """Copies the model of the rank with the most steps; all ranks call this."""
        rank, began_s = self._rank, self._rank.now_s
        self._adopt = None
        number = self._epoch, adopt.window
        if not (yield from rank.broadcast("adopt step", adopt.source, *number)):
            rank.fail(CANNOT_GO_ON)
        if books := rank.books:
            books.take_steps(rank.rank, adopt.source)
        rank.reduced = adopt.window
        self._report_model(adopt.window, rank.now_s - began_s)

    def _report_model(self, step: int, sync_s: float) -> None:
        """Reports that this rank's model now includes a step."""
        rank, epoch = self._rank.rank, self._epoch
        taken = ModelUpdated(rank=rank, epoch=epoch, window=step, sync_s=sync_s)
        self._sim.send(taken)

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
        match instruction:
            case EndEpoch():
                self._end = instruction
            case Regroup():
                self._regroup, self._has_changed = instruction, False
            case Adopt():
                self._adopt = instruction
            case LeaveOut():
                excluded = frozenset(instruction.left_out)
                self._has_changed = excluded != self._rank.excluded
                self._rank.is_cold |= self._has_changed
                self._rank.excluded = excluded
            case GrantBatches():
                self._granted(instruction)
            case _:
                assert isinstance(instruction, PASSED_OVER), instruction

    def _granted(self, grant: GrantBatches) -> None:
        """Loads this rank's shares of granted steps."""
        rank = self._rank
        if not self._lost.is_settled:
            self._reports.granted(grant)
        shares, counted = grant.shares, grant.shares[rank.rank]
        few = min(self._sim.cluster.run.min_share_samples, sum(shares))
        start = sum(shares[: rank.rank])
        own = start, start + counted
        steps = [
            Loaded(step, counted or few, counted, rank.parts_of(step, *own))
            for step in range(grant.start, grant.stop)
        ]
        self._loader.push(steps, rank.now_s)

    def _account(self, number: int, cost: BatchCost) -> None:
        """Records a finished step; a grant's report waits for the next backward."""
        if self._lost.is_settled:
            return  # steps begun before the death are not reported
        if self._reports.step_done(number, cost):
            self._reports.close(backward_passes=number + 1)

    def _report(self) -> None:
        event = self._reports.take()
        if event is not None:
            self._sim.send(event)
