"""Execution of an epoch under ``sync`` on one rank."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from elche.comm.gradients.part_weights import Lost, StepPart
from elche.comm.gradients.reducer import GradientReducer
from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.protocol.events import PassBegun, WindowReduced
from elche.coordination.protocol.instructions import (
    Adopt,
    EndEpoch,
    GrantSteps,
    Instruction,
    JoinPasses,
    LeaveOut,
    RankLeft,
    Regroup,
    SwitchPolicy,
)
from elche.coordination.protocol.messages import Runs
from elche.coordination.sync.lost_ranks import LostRanks, StepPlace
from elche.coordination.sync.step_reports import EARLY, StepReports
from elche.errors import (
    CommunicationError,
    ConfigError,
    ElcheError,
    ProtocolError,
    RankLostError,
)
from elche.runtime.data.leased_batches import LeasedBatches
from elche.runtime.data.positions import EpochPositions
from elche.runtime.process.worker import Worker
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.nonfinite_watch import NonFiniteWatch
from elche.runtime.window_epoch import EpochHooks

LEFT_OUT_S = 1.0
"""A rank that is left out looks so often whether its run goes on."""
TOO_EARLY = (
    f"a rank has died, and {EARLY}, whose part of the epoch is over or reported: start "
    "the run anew from its last checkpoint (--max-restarts)"
)


class Step(NamedTuple):
    """This rank's part of one global batch.

    A rank without samples gets some to run its loop body on (the same control flow, the
    same optimizer step), but weighs nothing. ``part`` is what of the step is its own:
    epoch and step, its first sample and one past the last, or (). ``span`` is the part
    of an epoch that it is a step of, among all of the run.
    """

    step: int
    samples: int
    shares: tuple[int, ...]
    part: tuple[int, ...] = ()
    span: int = 0

    def weighed(self, weight: float | None) -> StepPart:
        """How its gradients weigh.

        Args:
            weight: what the user says; None: its samples.
        """
        scale = self.samples / max(1, sum(self.shares))
        active = sum(share > 0 for share in self.shares)
        return StepPart(scale, active, weight, label=self)

    def among(self, ranks: Sequence[int]) -> Step:
        """The same without the shares of all others."""
        shares = tuple(n if r in ranks else 0 for r, n in enumerate(self.shares))
        return Step(self.step, self.samples, shares, self.part, self.span)

    def is_same(self, other: Step | None) -> bool:
        """Whether it is the same global batch."""
        return other is not None and (self.span, self.step) == (other.span, other.step)


class SyncEpoch:
    """Hands out this rank's share of every global batch.

    Ends early, with ``switch`` set, where windows take over (``auto``); instructions
    that came after that are ``later``.

    Args:
        worker: this rank's shell.
        batches: the leased stream of batches.
        positions: the epoch.
        reducer: reduces gradients during backward.
        min_share_samples: least samples that the model can train on.
        hooks: where metrics go, and what is checked at every step.
    """

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
        self._reducer = reducer
        self._min_share_samples = min_share_samples
        self._hooks = hooks
        self._reports = StepReports(worker.rank, positions.epoch, hooks.numbers)
        self._dead = LostRanks() if hooks.steps is None else hooks.steps.lost
        self._span = self._dead.parts
        self._is_inside = self._has_said = self._is_early = self._is_held = False
        self._ran: deque[tuple[int, BatchCost, int]] = deque()
        self._said_until = 0
        self._watch_numbers()
        self._granted_until = 0
        self._granted: dict[int, Step] = {}  # not done
        self._step = -1
        self._gone: dict[int, int] = {}
        self._announced: PassBegun | None = None
        self._is_leaving = self._is_left_out = False
        self._joins: JoinPasses | None = None
        self.end: EndEpoch | None = None
        self.switch: SwitchPolicy | None = None
        self.later: list[Instruction] = []
        self.samples_done = 0
        self.samples_in_hand = 0
        self.weight_in_hand = 0.0
        self._began_s = self._ready_s = self._transfer_s = 0.0

    def _watch_numbers(self) -> None:
        """Looks for NaN and Inf in what is reduced from now on."""
        numbers = NonFiniteWatch(self._reducer.parameters, self._hooks.numbers)
        self._reducer.look_before(partial(_look, numbers, self._hooks.graphs))
        self._reducer.outlive_by(self.regroup)
        self._numbers = numbers

    @property
    def open_batch(self) -> Runs:
        """Positions of the step whose backward pass is to come, of all ranks."""
        waits = open_step(self._reducer, self._hooks.graphs)
        if waits is None or waits.span != self._span:
            return ()
        first = self._positions.sizes.position_of(waits.step)
        return ((first, first + self._positions.samples_of(waits.step)),)

    def refill(self) -> None:
        """Reads grants that have come; called when the loader draws."""
        self._worker.take_all(self.handle)

    def batches(self) -> Generator[Any, None, None]:
        """Yields this rank's batches; a break ends the epoch."""
        in_hand: Step | None = None
        self._worker.on_rank_left = self._rank_left
        self._hooks.graphs.begin_epoch(self._weigh_late)
        try:
            for in_hand, data in self._steps():
                self.samples_in_hand = in_hand.samples
                self.weight_in_hand = self._weight_of(in_hand)
                yield data
        except GeneratorExit:
            try:
                self._leave(in_hand)
            except ElcheError as error:
                self._hooks.on_error(error)
        finally:
            self._hooks.graphs.end_epoch()
            self._reducer.correct_by(None)
            self._reducer.outlive_by(None)
            self._worker.on_rank_left = None

    def _weight_of(self, step: Step) -> float:
        """What the step that was taken last weighs on this rank."""
        weight = self._leased.weight
        return float(step.samples) if weight is None or not step.samples else weight

    def leave(self) -> None:
        """The loop had broken off before this began."""
        self._hooks.graphs.begin_epoch(self._weigh_late)
        try:
            self._leave(None)
        except ElcheError as error:
            self._hooks.on_error(error)
        finally:
            self._hooks.graphs.end_epoch()
            self._reducer.outlive_by(None)

    def _leave(self, in_hand: Step | None) -> None:
        """The loop has broken off in this step, or before the first.

        What the others were granted they run: this rank takes part in it with nothing,
        and takes their model over if it has missed steps. Where a rank has died, and
        all have run what they had begun, the epoch pauses first.
        """
        if self._worker.is_closed or self.end is not None:
            return
        if self._reducer.is_delayed:
            return  # a Trainer's loop, which only an error leaves: it is reported
        self._account_all()
        has_passed = in_hand is not None and self._place.first > in_hand.step
        if in_hand and has_passed and self._dead.is_over(in_hand.step + 1):
            self._end_step(in_hand)  # the others run no more: the rest is left
            self._report()
            self._await_end()
            return
        self._is_leaving = True
        broken, apart = None, ""
        if not self._reducer.is_joinable:
            apart = "SyncBatchNorm layers need every rank's forward pass"
        elif self._worker.meets_in_forward:
            apart = "elche.all_gather needs every rank's forward pass"
        try:
            self._reducer.end_step()
        except CommunicationError as error:
            broken, apart = error, str(error)
        self._report()
        handed_out, cost = 0, None
        if in_hand is not None:
            handed_out, cost = in_hand.step + 1, self._cost(in_hand)
            self.samples_done += self._positions.samples_of(in_hand.step)
        self._numbers.report(final=True)
        passes = self._reducer.backward_passes
        scalars = self._hooks.scalars(True)
        left = self._reports.left(
            handed_out,
            cost,
            scalars,
            passes=passes,
            apart=apart,
            checksum=self._hooks.checksum(),
        )
        self._worker.send(left)
        if broken is not None:
            raise broken  # most likely this rank fails; others do not wait for it
        while self.end is None and self.switch is None:
            self._worker.receive(self.handle, "the other ranks to end the epoch")
            self._join_passes()

    def _join_passes(self) -> None:
        """Takes part with nothing in what the others have begun."""
        joins = self._joins
        while joins is not None and self._reducer.backward_passes < joins.passes:
            self._reducer.join_pass(self._granted[joins.step - 1].weighed(None))

    def _rank_left(self, gone: RankLeft) -> None:
        """Another rank's loop has left the epoch; may be called again and again."""
        if not self._is_leaving and gone.epoch == self._positions.epoch:
            self._gone[gone.gone] = gone.passes
            self._reducer.correct_by(self._lost)
            self._announce()

    def _announce(self) -> None:
        """Says how far this rank is, for those that have left to join it."""
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

    def _lost(self, step: Step, number: int) -> Lost:
        """What ranks that have left do not bring to a pass of a step."""
        shares = step.shares
        lost = [shares[rank] for rank, passes in self._gone.items() if passes < number]
        ranks = sum(share > 0 for share in lost)
        active = sum(share > 0 for share in shares)
        return Lost(sum(lost) / sum(shares), ranks / active)

    def _steps(self) -> Iterator[tuple[Step, Any]]:
        self._began_s = time.monotonic()
        for number in range(self._positions.num_batches):
            got = self._next(number)
            if got is None:
                self._hooks.drain()
                return
            step, data = got
            self._ready_s = time.monotonic()
            self._transfer_s = self._leased.transfer_s
            self._hooks.check()
            self._step, self._is_inside = number, True
            self._granted.pop(number - 1, None)
            if self._gone:
                self._reducer.run_beneath(self._report_beneath)
            part = self._part_of(step)
            self._reducer.begin_step(part)
            self._hooks.graphs.begin(part)
            yield step, data
            self._end_step(step)
        self._hooks.drain()
        self._account_all()
        self._report()
        self._await_end()

    def _end_step(self, step: Step) -> None:
        """The loop comes back from a step."""
        self._is_inside = False
        self._reducer.end_step()
        self._worker.pace_device()
        cost, passes = self._cost(step), self._reducer.backward_passes
        self.samples_done += self._positions.samples_of(step.step)
        self._ran.append((step.step, cost, passes))
        while self._ran and self._ran[0][0] < self._place.first:
            self._account(*self._ran.popleft())

    def _cost(self, step: Step) -> BatchCost:
        """What the step took until now; the next one begins."""
        times_s = self._began_s, self._ready_s, time.monotonic()
        self._began_s = times_s[-1]
        wait_s = self._reducer.wait_s
        self._worker.timeline.batch("step", step.step, times_s, step.samples, wait_s)
        is_warm, self._worker.is_cold = not self._worker.is_cold, False
        return BatchCost.measured(
            step.samples,
            times_s,
            self._transfer_s,
            wait_s,
            is_timed=is_warm,
        )

    def _next(self, number: int) -> tuple[Step, Any] | None:
        """The next batch; waits only if its grant has not come.

        None: see `switch`, or the epoch ends here because a rank has left it.
        """
        while not self._is_over(number):
            got = self._leased.take()
            is_over = self.end is not None or self.switch is not None
            if self._worker.is_due and not is_over:
                self.regroup()
                if self._dead.is_over(number):
                    break
            if got is not None:
                if got[0].step != number:
                    raise ProtocolError(f"expected step {number}, loaded {got[0]}")
                return got
            self._report()
            waits = self._granted_until <= number and not self._leased.has_work
            is_over = self.end is not None or self.switch is not None
            is_over |= self._worker.is_due
            if is_over or not waits:  # drawing may have brought it
                continue
            if not self._is_early or self._is_held:  # the grant may wait for it
                self._account_all()
                self._report()
            if self._is_left_out:  # for as long as the others train
                self._worker.sleep_until_told(LEFT_OUT_S)
                self._worker.take_all(self.handle)
            else:
                self._worker.receive(self.handle, f"the grant of step {number}")
        self._account_all()
        self._report()
        if self._dead.is_over(number):
            self._await_end()
        return None

    def _is_over(self, number: int) -> bool:
        """Whether this rank runs no step of this number, and none after it."""
        is_switched = self.switch is not None and number >= self.switch.step
        return self.end is not None or is_switched or self._dead.is_over(number)

    def _await_end(self) -> None:
        """All steps are run; where ranks have died, says so."""
        while self.end is None:
            if self._dead.is_settled and not self._has_said:
                self._has_said = True
                self._say_taken(self._dead.last, 0.0)
            self._worker.receive(self.handle, "the end of the epoch")
            if self._worker.is_due:
                self.regroup()

    def handle(self, instruction: Instruction) -> None:
        """Takes a grant, or the end of the epoch."""
        if isinstance(instruction, Regroup):
            self._worker.hear_of(instruction)
            return
        if self.switch is not None:
            self.later.append(instruction)
            return
        if isinstance(instruction, SwitchPolicy):
            self.switch = instruction
            return
        if isinstance(instruction, EndEpoch):
            self.end = instruction
            return
        if isinstance(instruction, RankLeft):
            self._rank_left(instruction)
            return
        if isinstance(instruction, JoinPasses):
            self._joins = instruction
            return
        if isinstance(instruction, Adopt):
            self._adopt(instruction)
            return
        if isinstance(instruction, LeaveOut):
            self._leave_out(instruction)
            return
        if not isinstance(instruction, GrantSteps):
            raise ProtocolError(f"unexpected in an epoch of sync: {instruction!r}")
        self._is_held = instruction.start == instruction.stop  # none for now
        if self._is_held:
            return
        if not self._dead.is_settled:
            self._reports.granted(instruction)
        shares, rank = instruction.shares, self._worker.rank
        start, samples = sum(shares[:rank]), shares[rank]
        for number in range(instruction.start, instruction.stop):
            own = (self._positions.epoch, number, start, start + samples)
            part = own if samples else ()
            step = Step(number, samples, shares, part, self._span)
            self._granted[number] = step
            if samples:
                batch = self._positions.index_batch(number, start, start + samples)
            else:
                few = min(self._min_share_samples, sum(shares))
                batch = self._positions.index_batch(number, 0, few)
            self._leased.push(step, batch)
        self._granted_until = instruction.stop
        if self._granted_until == self._positions.num_batches:
            self._leased.end()

    def _leave_out(self, told: LeaveOut) -> None:
        """Shares steps among others from the next one on."""
        assert self._hooks.leave_out is not None
        self._is_left_out = self._worker.rank in told.left_out
        reducer = self._hooks.leave_out(told)
        if reducer is not self._reducer:
            self._reducer = reducer
            self._watch_numbers()

    def _adopt(self, adopt: Adopt) -> None:
        """Takes over the model of a rank that has run all steps, with all ranks."""
        assert self._hooks.adopt is not None
        began_s = time.monotonic()
        self._hooks.adopt(adopt.source)
        self._say_taken(adopt.window, time.monotonic() - began_s)

    def _say_taken(self, step: int | None, sync_s: float) -> None:
        """The model is that after a step."""
        assert step is not None
        self._worker.send(
            WindowReduced(
                rank=self._worker.rank,
                epoch=self._positions.epoch,
                window=step,
                sync_s=sync_s,
                wait_s=0.0,
                divergence=0.0,
                adopted_at=0,
            )
        )

    def regroup(self) -> None:
        """Ranks have died: forms the group of the others, and settles what was open."""
        steps, has_formed = self._hooks.steps, False
        assert steps is not None
        waits = open_step(self._reducer, self._hooks.graphs)
        if waits is not None and waits.span != self._span:
            raise CommunicationError(TOO_EARLY)
        self._report()
        self._reports.void()
        self._ran.clear()
        while not has_formed:
            self._worker.hear_of()
            with contextlib.suppress(RankLostError):  # the word of it is in line
                steps.form(self._place, self._alive)
                has_formed = True
        self._has_said = False
        if any(first < self._said_until for first in self._dead.first.values()):
            raise CommunicationError(TOO_EARLY)
        steps.say_regrouped(self._positions.epoch)

    @property
    def _place(self) -> StepPlace:
        """Where this rank is."""
        waits = open_step(self._reducer, self._hooks.graphs)
        passed: Step | None = self._reducer.passed
        return StepPlace.at(
            self._reducer.closed_passes,
            self._step,
            is_inside=self._is_inside,
            waits=waits.step if waits and waits.span == self._span else None,
            passed=passed.step if passed and passed.span == self._span else -1,
        )

    def _part_of(self, step: Step) -> StepPart:
        """A step without ranks that have died before it."""
        part = step.weighed(self._leased.weight)
        return self._alive(part) if self._dead.is_settled else part

    def _alive(self, part: StepPart) -> StepPart:
        """A part of a step, without ranks that have died since."""
        step: Step = part.label
        return step.among(self._worker.members).weighed(part.weight)

    def _weigh_late(self, part: StepPart, other: StepPart | None) -> None:
        """A backward pass comes to the graph of a batch before the one in hand.

        Raises:
            ConfigError: it came to another batch's before.
        """
        if other is None:
            self._reducer.weigh_pass(self._alive(part))
            return
        first, second = sorted(each.label.step for each in (part, other))
        raise ConfigError(
            "one backward pass goes through the forward passes of batches "
            f"{first} and {second}, of which the ranks hold other shares, so that no "
            "weight of its gradients is right for both: call backward() on each "
            "batch's loss, and the gradients add up until zero_grad()"
        )

    def _report(self) -> None:
        """Sends what is still to be said."""
        event = self._reports.take()
        if event is not None:
            self._reducer.run_beneath(None)
            self._worker.send(event)

    def _report_beneath(self) -> None:
        """The same inside a backward pass; reads what came since the last report."""
        self._report()
        self.refill()
        if self._worker.is_due:
            self.regroup()
        if self._gone:
            self._announce()

    def _account_all(self) -> None:
        """Also of steps whose backward pass has not come yet."""
        while self._ran:
            self._account(*self._ran.popleft())

    def _account(self, number: int, cost: BatchCost, passes: int) -> None:
        """A step is done; what is to be said of its grant waits for the next one."""
        if self._reports.is_due:
            self._report()  # there was no backward pass
        if self._dead.is_settled or not self._reports.step_done(number, cost):
            return
        is_last = number + 1 == self._positions.num_batches
        tells_norm = is_last and self._worker.place == 0
        self._numbers.report(final=is_last)
        self._said_until = number + 1
        self._is_early |= self._hooks.graphs.is_live
        self._reports.close(
            backward_passes=passes,
            max_samples=self._worker.max_samples,
            parameter_norm=self._hooks.parameter_norm() if tells_norm else 0.0,
            scalars=self._hooks.scalars(is_last),
            unknown=EARLY if self._hooks.graphs.is_live else self._hooks.unknown(),
        )
        self._reducer.run_beneath(self._report_beneath)


def open_step(reducer: GradientReducer, graphs: LiveGraph) -> Step | None:
    """The step whose backward pass is under way, or has not come since its forward."""
    part = reducer.part_under_way or graphs.live_batch
    if not isinstance(part, StepPart) or part.label.is_same(reducer.passed):
        return None
    step: Step = part.label
    return step


def _look(
    numbers: NonFiniteWatch, graphs: LiveGraph, step: Step, came: dict[int, int]
) -> None:
    """A backward pass of a step is complete, and its gradients not reduced."""
    graphs.refuse_unseen()
    numbers.look(step.part, came)
