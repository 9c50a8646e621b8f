"""A rank's decisions in an epoch of windows, as a state machine without effects.

The worker's shell and the simulator run this same code. They pass in instructions and
the time, request the next action, execute it and report its completion. Under
``cadence`` a rank that has closed its window waits for the reduction. *Overlapped*
(``async``) it trains on and adopts the result at the next batch boundary. It waits only
if the reduction outlasts a whole window. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from elche.cadence.rank_time import RankTime
from elche.cadence.window import should_close
from elche.coordination.protocol.instructions import (
    Adopt,
    CloseWindow,
    EndEpoch,
    Instruction,
    OpenWindow,
    Permit,
    Reduce,
    Regroup,
)
from elche.coordination.windows.loop_phases import ResultPhase, WindowPhase
from elche.errors import ProtocolError


class Do(Enum):
    """Kinds of action."""

    TRAIN = auto()
    """Train on the next leased batch; then call `WindowLoop.trained`."""
    WAIT = auto()
    """Wait for an instruction, at most ``timeout_s``."""
    CLOSE = auto()
    """Send `WindowClosed`; then call `closed`.

    Overlapped: copy what is to be reduced, and begin if this rank has trained.
    """
    REDUCE = auto()
    """Run the blocking reduction; then call `reduced`."""
    BEGIN = auto()
    """Begin the overlapped reduction unless it has begun; then call `begun`."""
    FINISH = auto()
    """Wait for the overlapped reduction and adopt it; then call `reduced`."""
    REGROUP = auto()
    """Form the group of the new generation; then call `regrouped`."""
    ADOPT = auto()
    """Copy the common model from another rank; then call `reduced`."""
    STOP = auto()
    """The epoch has ended."""


@dataclass(frozen=True, slots=True)
class Action:
    """Next action of the loop.

    Attributes:
        do: kind of the action.
        instruction: instruction that it executes, if any.
        timeout_s: longest wait (s); None waits for an instruction without limit.
        why: description of what a wait is for.
    """

    do: Do
    instruction: Reduce | Regroup | Adopt | None = None
    timeout_s: float | None = None
    why: str = ""


LINGER_S = 1.0
"""Polling time (s) of an idle rank for a lease during its reduction; then it blocks on
the result.
"""
LOOK_EVERY_S = 0.02
LOOK_SOONER = 0.25
"""Poll backoff: fraction of the time waited so far."""

HELD_WINDOWS = 3
"""Windows for which a live graph may defer parameter changes."""

TRAIN = Action(Do.TRAIN)
CATCH_UP = "the slowest rank to catch up"
CLOSED = "the other ranks to end the window"
AGAIN = "the remaining ranks to reduce again"
LEASE = "another lease"
CLOSE = Action(Do.CLOSE)
STOP = Action(Do.STOP)


class WindowLoop:
    """One rank's windows in one epoch; their phases: `WindowPhase`, `ResultPhase`.

    A rank that awaits its last window's result waits under ``cadence``. Under ``async``
    it trains on, unless it is *diverged* (its last update was not finite). While a
    graph is *live* (a backward pass is still to come), no action changes parameters,
    for at most three windows of batches.

    Args:
        batch_cost: this rank's delivered time per batch; kept across epochs.
        overlapped: train while a window is reduced.
        reduced: last window whose result this rank holds.
    """

    def __init__(
        self, batch_cost: RankTime, *, overlapped: bool, reduced: int = -1
    ) -> None:
        self._batch_cost = batch_cost
        self._overlapped = overlapped
        self._plan: OpenWindow | None = None
        self._permit: int | None = None
        self._current = WindowPhase.UNOPENED
        self._result = ResultPhase.HELD
        self._reduce: Reduce | None = None
        self._regroup: Regroup | None = None
        self._adopt: Adopt | None = None
        self._is_diverged = False
        self._opened_s = self._looked_s = 0.0
        self._idle_s: float | None = None
        self._held_batches = 0
        self._is_held_back = False
        self.window = reduced + 1
        self.batches = 0
        self.reduced_window = reduced
        self.end: EndEpoch | None = None

    @property
    def progress_samples(self) -> float:
        """Samples of the run before this window, plus planned samples so far."""
        plan = self._plan
        if plan is None:
            return 0.0
        done = self.batches if self._is_open else plan.planned_batches
        part = min(1.0, done / max(1, plan.planned_batches))
        return plan.committed_samples + plan.planned_samples * part

    @property
    def committed_samples(self) -> int:
        """Samples of the run before this window: the same on every rank."""
        return 0 if self._plan is None else self._plan.committed_samples

    @property
    def is_throttled(self) -> bool:
        """True if other ranks wait for a report of every batch."""
        return self._permit is not None

    @property
    def _is_open(self) -> bool:
        return self._current is not WindowPhase.UNOPENED

    @property
    def _is_planned(self) -> bool:
        """True if this epoch follows a plan."""
        return self._plan is not None and self._plan.adopt_at is not None

    @property
    def _is_held(self) -> bool:
        return self._permit is not None and self.batches >= self._permit

    @property
    def begins_at_close(self) -> bool:
        """True if this rank begins to reduce at its close, before the plan arrives.

        It has trained, so a reduction will follow. Planned windows are excluded: they
        end by count, and a slow rank may exceed a collective's own deadline.
        """
        return self._overlapped and self.batches > 0 and not self._is_planned

    @property
    def in_flight(self) -> Reduce | None:
        """The overlapped reduction in flight; None if a new group voids it."""
        is_begun = self._result is ResultPhase.IN_FLIGHT and self._regroup is None
        return self._reduce if is_begun else None

    def handle(self, instruction: Instruction, now_s: float) -> None:
        """Handles an instruction of the epoch.

        Raises:
            ProtocolError: the instruction is unexpected here.
        """
        match instruction:
            case OpenWindow():
                self._open(instruction, now_s)
            case Permit():
                if instruction.window == self.window:
                    self._permit = instruction.batches
            case CloseWindow(drain=drain):
                if instruction.window == self.window and self._is_open:
                    draining, closing = WindowPhase.DRAINING, WindowPhase.CLOSING
                    self._current = draining if drain else closing
            case Reduce():
                self._plan_reduction(instruction)
            case Regroup():
                self._regroup = instruction
            case Adopt():
                self._adopt = instruction
            case EndEpoch():
                self.end = instruction
            case _:
                raise ProtocolError(f"unexpected in windows: {instruction!r}")

    def next(
        self,
        now_s: float,
        *,
        has_work: bool,
        is_reduced: bool = False,
        is_live: bool = False,
    ) -> Action:
        """Returns the next action.

        Args:
            now_s: current time.
            has_work: whether a leased batch is loaded or being loaded.
            is_reduced: whether the overlapped reduction is done.
            is_live: whether changed parameters would break a backward pass to come.
        """
        self._looked_s = now_s
        action = self._next(now_s, has_work, is_reduced)
        if not is_live:
            self._held_batches = 0
        self._is_held_back = is_live and self._may_hold(action)
        if self._is_held_back and has_work:
            action = TRAIN
        elif self._is_held_back and not self._must_close():
            action = self._look_again(now_s, LEASE) or action
        if action.do is not Do.WAIT:
            self._idle_s = None
        return action

    def _next(self, now_s: float, has_work: bool, is_reduced: bool) -> Action:
        urgent = self._urgent(is_reduced)
        if urgent is not None:
            return urgent
        if self._is_diverged:  # it would train on NaN parameters
            return self._finish_or_wait("the mean to restart from")
        if self._owes and not self._overlapped:
            return Action(Do.WAIT, why=AGAIN if self._is_open else CLOSED)
        continues = self._overlapped and self._plan is not None and has_work
        if not self._is_open and not continues:
            return self._wait_closed(now_s)
        if self._is_over(now_s):
            return self._end_of_window(now_s, has_work)
        if self._is_held:
            return self._hold(now_s, CATCH_UP)
        if has_work:
            return TRAIN
        return self._linger(now_s, LEASE) or self._hold(now_s, LEASE)

    def _may_hold(self, action: Action) -> bool:
        """True if a batch may be trained before the action; never under a plan."""
        if self._plan is None or self._is_planned or self._is_diverged:
            return False
        moves_model = action.do is (Do.FINISH if self._overlapped else Do.CLOSE)
        limit = HELD_WINDOWS * max(1, self._plan.planned_batches)
        return moves_model and self._held_batches < limit

    def trained(self, busy_s: float | None) -> None:
        """Counts a batch; ``busy_s`` is its delivered time (s), None if untimed."""
        self.batches += 1
        self._held_batches += self._is_held_back
        if busy_s is not None:
            self._batch_cost.observe(1, busy_s)

    def closed(self, now_s: float, *, is_finite: bool = True) -> None:
        """Records that this rank has closed its window."""
        if not self._is_open or self._owes:
            raise ProtocolError(
                f"window {self.window} is closed while {self._current.name}, the last "
                f"result {self._result.name}"
            )
        self._is_diverged = self._overlapped and not is_finite
        self._current, self._result = WindowPhase.UNOPENED, ResultPhase.OWED
        if self._permit is not None:
            self._permit = 0  # until the next window's plan sets the limit
        self.window += 1
        self.batches = 0
        self._opened_s = now_s

    def begun(self) -> None:
        """Records that the overlapped reduction is in flight."""
        if self._result is not ResultPhase.PLANNED:
            raise ProtocolError(f"a reduction begins while it is {self._result.name}")
        self._result = ResultPhase.IN_FLIGHT

    def reduced(self, now_s: float) -> None:
        """Records that this rank's model includes the last closed window's result."""
        done = self._adopt or self._reduce
        assert done is not None
        self.reduced_window = max(self.reduced_window, done.window)
        self._adopt = self._reduce = None
        if done.window == self.window - 1:  # else a later window was closed
            self._result, self._is_diverged = ResultPhase.HELD, False
        if not self._overlapped and not isinstance(done, Adopt):
            self._opened_s = now_s

    def regrouped(self) -> Regroup:
        """Records that the new group is formed; the old reduction is void."""
        assert self._regroup is not None
        done, self._regroup = self._regroup, None
        self._reduce = self._adopt = None
        if self._owes:
            self._result = ResultPhase.OWED
        return done

    def _plan_reduction(self, plan: Reduce) -> None:
        if self._result is not ResultPhase.OWED or plan.window != self.window - 1:
            raise ProtocolError(
                f"the result of window {self.window - 1} is {self._result.name}, got "
                f"{plan!r}"
            )
        self._reduce, self._result = plan, ResultPhase.PLANNED
        if self._overlapped:
            # All ranks have closed the last window, since this rank last checked.
            self._opened_s = max(self._opened_s, self._looked_s)

    def _open(self, plan: OpenWindow, now_s: float) -> None:
        if self._plan is None or not self._overlapped:
            self._opened_s = now_s  # overlapped, it begins where the last one ended
        if plan.window != self.window or self._is_open:
            raise ProtocolError(f"expected window {self.window}, got {plan!r}")
        self._plan, self._permit = plan, plan.hold_after
        self._current = WindowPhase.OPEN
        if self._result is ResultPhase.OWED and not (self._overlapped or self._adopt):
            self._result = ResultPhase.HELD

    def _urgent(self, is_reduced: bool) -> Action | None:
        """Returns an action that precedes any training, or None."""
        if self._regroup is not None:
            return Action(Do.REGROUP, self._regroup)
        if self._adopt is not None:
            return Action(Do.ADOPT, self._adopt)
        if self._result is ResultPhase.PLANNED:
            return Action(Do.BEGIN if self._overlapped else Do.REDUCE, self._reduce)
        if self.end is not None:
            return STOP
        at = self._plan.adopt_at if self._plan is not None else None
        if at is None:
            if self.in_flight is not None and is_reduced:
                return Action(Do.FINISH, self._reduce)
        elif self._owes and self._is_open:
            is_void = self._current is WindowPhase.DRAINING  # the rest of the plan
            if is_void or self.batches >= at:
                return self._finish_or_wait("the reduction of the last window")
        return None

    @property
    def _owes(self) -> bool:
        """True if the result of the last closed window has not been adopted."""
        return self._result is not ResultPhase.HELD

    def _finish_or_wait(self, why: str, timeout_s: float | None = None) -> Action:
        if self.in_flight is not None:
            return Action(Do.FINISH, self._reduce)
        return Action(Do.WAIT, timeout_s=timeout_s, why=why)

    def _wait_closed(self, now_s: float) -> Action:
        if self._is_planned:
            return Action(Do.WAIT, why=CLOSED)
        lingers = None if self._is_open else self._linger(now_s, CLOSED)
        return lingers or self._finish_or_wait(CLOSED)

    def _linger(self, now_s: float, why: str) -> Action | None:
        """Returns a short wait for work, instead of blocking on a slow link.

        Usually a new window or a lease has been sent already, while adopting blocks
        until the reduction is done. None if neither can come, or after `LINGER_S`.
        """
        if self.in_flight is None or self._is_planned or self.end is not None:
            return None
        return self._look_again(now_s, why)

    def _look_again(self, now_s: float, why: str) -> Action | None:
        """Returns a short wait; None after `LINGER_S` in total."""
        if self._idle_s is None:
            self._idle_s = now_s
        waited_s = now_s - self._idle_s
        if waited_s >= LINGER_S:
            return None
        look_s = min(LOOK_EVERY_S, max(LOOK_SOONER * waited_s, 1e-3))
        return Action(Do.WAIT, timeout_s=look_s, why=why)

    def _end_of_window(self, now_s: float, has_work: bool) -> Action:
        """Closes once the last result is adopted; trains a while until then."""
        if not self._owes:
            return CLOSE if self._is_open else self._wait_closed(now_s)
        if not has_work or self._must_close() or self._is_late(now_s):
            return self._wait_closed(now_s)
        if self._is_held:
            return self._finish_or_wait(CATCH_UP)
        return TRAIN

    def _is_late(self, now_s: float) -> bool:
        """True if the last reduction has exceeded its patience."""
        patience_s = self._plan.patience_s if self._plan is not None else None
        return patience_s is None or now_s - self._opened_s >= patience_s

    def _must_close(self) -> bool:
        return self._current in (WindowPhase.CLOSING, WindowPhase.DRAINING)

    def _is_over(self, now_s: float) -> bool:
        if self._must_close():
            return True
        plan = self._plan
        if plan is None:
            return False
        if not self._is_open:  # overlapped, before the next window's plan
            is_planned = plan.adopt_at is not None or plan.wall_s is None
            return is_planned or now_s - self._opened_s >= (plan.wall_s or 0.0)
        if plan.max_batches is not None and self.batches >= plan.max_batches:
            return True
        if plan.wall_s is None:
            return False
        return should_close(
            now_s - self._opened_s, self._batch_cost.cost, plan.wall_s, self.batches
        )

    def _hold(self, now_s: float, why: str) -> Action:
        """Waits for a message or the end of this window, without work."""
        wall_s = self._plan.wall_s if self._plan is not None else None
        if not self._is_open or wall_s is None:
            return self._finish_or_wait(why)
        left_s = self._opened_s + wall_s - now_s
        if left_s > 0:
            return self._finish_or_wait(why, left_s)
        return self._wait_closed(now_s) if self._owes else CLOSE
