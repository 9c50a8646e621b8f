"""Execution of an epoch under ``sync`` on one rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any

from elche.comm.gradients.part_weights import StepPart
from elche.comm.gradients.reducer import GradientReducer
from elche.coordination.protocol.events import ModelUpdated, PassBegun
from elche.coordination.protocol.instructions import (
    Adopt,
    EndEpoch,
    GrantBatches,
    Instruction,
    JoinPasses,
    LeaveOut,
    RankLeft,
    Regroup,
)
from elche.coordination.protocol.messages import Runs
from elche.coordination.sync.lost_ranks import StepPlace
from elche.coordination.sync.step_reports import EARLY
from elche.errors import (
    CommunicationError,
    ConfigError,
    ElcheError,
    ProtocolError,
    RankLostError,
)
from elche.runtime.data.epoch_course import FAR_AHEAD, ranges_of
from elche.runtime.data.leased_data import LeasedBatches
from elche.runtime.data.positions import EpochPositions
from elche.runtime.process.worker import Worker
from elche.runtime.sync.epoch_hooks import EpochHooks
from elche.runtime.sync.step_account import Step, StepAccount, open_steps

EXCLUDED_POLL_S = 1.0
"""Poll interval of an excluded rank (s)."""
TOO_EARLY = (
    f"a rank has died, but {EARLY}, and that one's part of the epoch is over or "
    "reported: restart the run from its last checkpoint (--max-restarts)"
)


class _State(Enum):
    """States of a rank in an epoch of ``sync``, or a part of one.

    =====================================  ==================  ===================
    event                                  from                to
    =====================================  ==================  ===================
    the loop receives a step's batch       BETWEEN             INSIDE
    the loop asks for the next batch       INSIDE              BETWEEN
    `LeaveOut` names this rank             BETWEEN             EXCLUDED
    the loop breaks off                    BETWEEN, INSIDE     LEAVING
    the last step that a death left is     BETWEEN             SETTLED
    run
    another rank dies                      BETWEEN, SETTLED    BETWEEN
    another rank dies                      INSIDE, EXCLUDED    the same
    `EndEpoch`                             any but INSIDE      `SyncEpoch.end` set
    =====================================  ==================  ===================

    A step goes from `_grant` through the loader to `_begin_step`, the loop's body and
    `_end_step`. Its report is sent in the next step's backward pass, or when there is
    nothing else to do. Ranks may die in any wait of a pass, or between two steps: then
    `regroup` settles which steps are still run. While a rank is LEAVING, a death ends
    the run.
    """

    BETWEEN = "the loader loads, or waits for a grant"
    INSIDE = "the loop has a step's batch"
    EXCLUDED = "the loader waits for the end of the epoch; others run its steps"
    LEAVING = "the loop has ended; this rank joins passes that the others have begun"
    SETTLED = "all steps of the part that ends at a death are run and reported"


class SyncEpoch:
    """Yields this rank's share of every global batch."""

    def __init__(
        self,
        worker: Worker,
        batches: LeasedBatches,
        positions: EpochPositions,
        reducer: GradientReducer,
        min_share_samples: int,
        hooks: EpochHooks,
    ) -> None:
        self._worker = worker
        self._leased = batches
        self._positions = positions
        self._min_share_samples = min_share_samples
        self._hooks = hooks
        self._dead = hooks.steps.lost
        self._span = self._dead.parts
        self._account = StepAccount(worker, positions, hooks)
        self._gone: dict[int, int] = {}  # passes that each rank that left has reached
        self._announced: PassBegun | None = None
        self._joins: JoinPasses | None = None
        self._granted: dict[int, Step] = {}  # not done
        self._granted_until = 0
        self._step = -1
        self._part: StepPart | None = None
        self._state = _State.BETWEEN
        self._is_held = False  # no step is granted for now
        self.end: EndEpoch | None = None
        self.samples_done = 0
        self._reduce_by(reducer)

    def _reduce_by(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._account.watch(reducer)
        reducer.on_lost = self.regroup

    @property
    def current_samples(self) -> int:
        """Samples of the current batch."""
        return 0 if self._part is None else self._part.label.samples

    @property
    def current_weight(self) -> float:
        """Weight of the current batch in means: its samples, or ``weight_of``."""
        samples, part = self.current_samples, self._part
        by_user = None if part is None else part.weight
        return float(samples) if by_user is None or not samples else by_user

    @property
    def open_batch(self) -> Runs:
        """Positions of each step with a pending backward pass, of all ranks."""
        steps, is_cut = self._open_steps, self.end is not None and self.end.left
        own = [step.step for step in steps if step.span == self._span]
        if is_cut and len(own) < len(steps):
            raise ConfigError(FAR_AHEAD)
        return ranges_of(self._positions.sizes, own)

    @property
    def _open_steps(self) -> list[Step]:
        return open_steps(self._reducer, self._hooks.observer.graphs)

    @property
    def _first_open(self) -> int | None:
        """First step of this part of the epoch with a pending backward pass."""
        steps = open_steps(self._reducer, self._hooks.observer.graphs)
        own = (each.step for each in steps if each.span == self._span)
        return next(own, None) if steps else None

    def refill(self) -> None:
        """Handles received grants; called when the loader draws."""
        self._worker.take_all(self.handle)

    def batches(self) -> Generator[Any, None, None]:
        """Yields this rank's batches; a break ends the epoch."""
        current: Step | None = None
        with self._under_way():
            try:
                self._account.begin()
                for number in range(self._positions.num_batches):
                    got = self._next(number)
                    if got is None:
                        break
                    current, data = got
                    self._begin_step(current, data)
                    yield data
                    self._end_step(current)
                self._settle()  # also steps with a pending backward pass
                self._report()
                self._await_end()
            except GeneratorExit:
                self._break_off(current)

    def leave(self) -> None:
        """Ends a part whose loop had broken off before it began."""
        with self._under_way():
            self._break_off(None)

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        """Context of a part: weighs its passes, and serves ranks that leave."""
        graphs, is_part = self._hooks.observer.graphs, self._positions.is_part
        graphs.begin_epoch(self._weigh_late, self._weigh_forward, continues=is_part)
        self._worker.on_wait = self._waits
        try:
            yield
        finally:
            graphs.end_epoch()
            self._reducer.on_backward = None  # else it takes the next part's messages
            self._reducer.lost = None
            self._reducer.on_lost = None
            self._worker.on_wait = None

    def _break_off(self, current: Step | None) -> None:
        try:
            self._leave(current)
        except ElcheError as error:
            self._hooks.on_error(error)

    def _leave(self, current: Step | None) -> None:
        """Leaves the epoch after a break in this step, or before the first.

        The others run their granted steps: this rank joins them with weight 0, and
        copies their model if it has missed steps. After a death, when all have run
        their open steps, the epoch pauses first.
        """
        reducer = self._reducer
        if self._worker.is_closed or self.end is not None:
            return
        self._settle()
        has_passed = current is not None and self._place.first > current.step
        if current and has_passed and current.step >= self._dead.last:
            self._end_step(current)  # the others run no further steps
            self._report()
            self._await_end()
            return
        self._state, self._worker.on_wait = _State.LEAVING, None
        broken, apart = None, ""
        if not reducer.is_joinable:
            apart = "SyncBatchNorm layers need every rank's forward pass"
        elif self._worker.meets_in_forward:
            apart = "elche.all_gather needs every rank's forward pass"
        try:
            reducer.end_step()
        except CommunicationError as error:
            broken, apart = error, str(error)
        self._report()
        if current is not None:
            self.samples_done += self._positions.samples_of(current.step)
        self._account.leave(current, self._reducer, apart)
        if broken is not None:
            raise broken  # most likely this rank fails; others do not wait for it
        while self.end is None:
            self._worker.receive(self.handle, "the other ranks to end the epoch")
            while (joins := self._joins) and reducer.backward_passes < joins.passes:
                reducer.join_pass(self._granted[joins.step - 1].weighed(None))

    def _rank_left(self, gone: RankLeft) -> None:
        """Records that another rank's loop has left; may be called repeatedly."""
        if self._state is not _State.LEAVING and gone.epoch == self._positions.epoch:
            self._gone[gone.gone] = gone.passes
            self._reducer.lost = partial(Step.lost, gone=self._gone)
            self._announce()

    def _waits(self, gone: Iterable[RankLeft]) -> None:
        for each in gone:
            self._rank_left(each)
        if self._state is _State.INSIDE:  # else passes may be another reducer's soon
            self._announce()

    def _announce(self) -> None:
        """Reports this rank's position to ranks that left, which join its passes."""
        begun = PassBegun(
            rank=self._worker.rank,
            epoch=self._positions.epoch,
            step=self._step + 1,
            passes=self._reducer.backward_passes,
            gone=len(self._gone),
        )
        if begun != self._announced:
            self._announced = begun
            self._worker.send(begun)

    def _begin_step(self, step: Step, data: Any) -> None:
        """Begins a step, whose batch the loop is about to receive."""
        self._account.ready(self._leased.transfer_s)
        self._hooks.check()
        self._step, self._state = step.step, _State.INSIDE
        self._granted.pop(step.step - 1, None)
        if self._gone:
            self._reducer.on_backward = self._report_in_backward
        part = step.weighed(self._leased.weight)
        if self._dead.first:
            part = self._alive(part)
        self._part = part
        self._reducer.begin_step(part)
        self._hooks.observer.graphs.begin(part, data)

    def _end_step(self, step: Step) -> None:
        """Ends a step, when the loop asks for the next batch."""
        self._state = _State.BETWEEN
        self._reducer.end_step()
        self._worker.pace_device()
        self._account.step_ran(step, self._reducer)
        self.samples_done += sum(step.shares)
        first = self._first_open
        self._settle(step.step + 1 if first is None else first)

    def _next(self, number: int) -> tuple[Step, Any] | None:
        """The next batch; waits only if its grant has not come.

        None: the epoch ends here, because it is cut or a rank has left it.
        """
        while self.end is None and number <= self._dead.last:
            got = self._leased.take()
            if self._worker.is_due and self.end is None:
                self.regroup()
                if number > self._dead.last:
                    break
            if got is not None:
                if got[0].step != number:
                    raise ProtocolError(f"expected step {number}, loaded {got[0]}")
                return got
            self._report()
            waits = self._granted_until <= number and not self._leased.has_work
            if waits and self.end is None and not self._worker.is_due:
                self._await_grant(number)
        return None

    def _await_grant(self, number: int) -> None:
        """Waits for an instruction; an excluded rank polls instead."""
        is_early = self._account.is_early and len(self._open_steps) < 2
        if not is_early or self._is_held:  # the grant may wait for the report
            self._settle()
            self._report()
        if self._state is _State.EXCLUDED:
            self._worker.sleep_until_message(EXCLUDED_POLL_S)
            self.refill()
        else:
            self._worker.receive(self.handle, f"the grant of step {number}")

    def _await_end(self) -> None:
        """Waits for the epoch's end; reports the last step where ranks have died."""
        while self.end is None:
            if self._dead.is_settled and self._state is _State.BETWEEN:
                self._state = _State.SETTLED
                self._report_model(self._dead.last, 0.0)
            self._worker.receive(self.handle, "the end of the epoch")
            if self._worker.is_due:
                self.regroup()

    def handle(self, instruction: Instruction) -> None:
        """Handles an instruction of the epoch."""
        match instruction:
            case GrantBatches():
                self._grant(instruction)
            case Regroup():
                self._worker.note_regroup(instruction)
            case EndEpoch():
                self.end = instruction
            case RankLeft():
                self._rank_left(instruction)
            case JoinPasses():
                self._joins = instruction
            case Adopt():
                began_s = time.monotonic()
                self._hooks.steps.adopt(instruction.source, instruction.epoch)
                self._report_model(instruction.window, time.monotonic() - began_s)
            case LeaveOut():
                self._exclude(instruction)
            case _:
                raise ProtocolError(f"unexpected in an epoch of sync: {instruction!r}")

    def _grant(self, grant: GrantBatches) -> None:
        """Queues this rank's parts of more steps for loading."""
        self._is_held = grant.start == grant.stop  # none for now
        if self._is_held:
            return
        self._account.granted(grant)
        shares, rank = grant.shares, self._worker.rank
        start, samples = sum(shares[:rank]), shares[rank]
        few = min(self._min_share_samples, sum(shares))
        own = (start, start + samples) if samples else (0, few)
        for number in range(grant.start, grant.stop):
            part = (self._positions.epoch, number, *own) if samples else ()
            step = Step(number, samples, shares, part, self._span)
            self._granted[number] = step
            self._leased.push(step, self._positions.index_batch(number, *own))
        self._granted_until = grant.stop
        if self._granted_until == self._positions.num_batches:
            self._leased.end()

    def _exclude(self, instruction: LeaveOut) -> None:
        if self._worker.rank in instruction.left_out:
            self._state = _State.EXCLUDED
        reducer = self._hooks.steps.exclude(instruction)
        if reducer is not self._reducer:
            self._reduce_by(reducer)

    def _report_model(self, step: int, sync_s: float) -> None:
        """Reports that this rank's model includes a step."""
        rank, epoch = self._worker.rank, self._positions.epoch
        taken = ModelUpdated(rank=rank, epoch=epoch, window=step, sync_s=sync_s)
        self._worker.send(taken)

    def regroup(self) -> None:
        """Forms the survivors' group after deaths, and settles open steps."""
        steps, has_formed = self._hooks.steps, False
        if any(step.span != self._span for step in self._open_steps):
            raise CommunicationError(TOO_EARLY)
        self._report()
        self._account.void()
        while not has_formed:
            self._worker.note_regroup()
            with contextlib.suppress(RankLostError):  # its `Regroup` is queued
                group = self._hooks.regrouping.meet()
                steps.settle(group, self._place, self._alive)
                has_formed = True
        if self._state is _State.SETTLED:
            self._state = _State.BETWEEN
        reported = self._account.reported
        if any(first < reported for first in self._dead.first.values()):
            raise CommunicationError(TOO_EARLY)
        steps.report_regrouped(self._positions.epoch)

    @property
    def _place(self) -> StepPlace:
        """Position of this rank in its steps."""
        passed: Step | None = self._reducer.passed
        return StepPlace.at(
            self._reducer.closed_passes,
            self._step,
            is_inside=self._state is _State.INSIDE,
            waits=self._first_open,
            passed=passed.step if passed and passed.span == self._span else -1,
        )

    def _alive(self, part: StepPart) -> StepPart:
        """Returns a part of a step without dead ranks."""
        step: Step = part.label
        return step.among(self._worker.members).weighed(part.weight)

    def _weigh_forward(self, part: StepPart | None) -> None:
        """Sets a forward pass's weight, also for an earlier batch; None at its end."""
        if part is not None:
            self._part = part = self._alive(part)
        self._reducer.weigh_forward(part)

    def _weigh_late(self, part: StepPart, other: StepPart | None) -> None:
        """Weighs a backward pass that reaches the graph of an earlier batch.

        Raises:
            ConfigError: the pass has reached another batch's graph before.
        """
        if other is None:
            self._reducer.weigh_pass(self._alive(part))
            return
        first, second = sorted(each.label.step for each in (part, other))
        raise ConfigError(
            f"one backward pass goes through the forward passes of batches {first} "
            f"and {second}, in which ranks have different shares, so no single weight "
            "fits both: call backward() on each batch's loss; gradients accumulate "
            "until zero_grad()"
        )

    def _settle(self, first: int | None = None) -> None:
        """Completes steps before ``first``; the next pass sends their report."""
        if self._account.settle(first):
            is_due = self._account.due is not None
            self._reducer.on_backward = self._report_in_backward if is_due else None

    def _report(self) -> None:
        if self._account.report():
            self._reducer.on_backward = None

    def _report_in_backward(self) -> None:
        """Sends the due report, and handles received instructions."""
        self._report()
        self.refill()
        if self._worker.is_due:
            self.regroup()
        if self._gone:
            self._announce()
