"""The coordination core: ``handle(event, now_s) -> instructions``.

Owns membership, the agreement of ranks at the start, epochs, barriers, deadlines and
endings; what happens inside an epoch is its policy's. It never reads a clock and never
does I/O: the shell (`elche.runtime.coordinator`) feeds it and carries out what it
answers. Each decision leaves a line in the story, which every error prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elche.cadence.own_guard import FindGuard, guard_maker, no_own_guards
from elche.config import RunConfig
from elche.coordination.agreement import (
    disagreement,
    opened_differently,
    settings_of,
)
from elche.coordination.gathering import Barriers, EpochEnding
from elche.coordination.ledger import BatchSizes, Range
from elche.coordination.messages import (
    PROTOCOL_VERSION,
    Abort,
    BarrierReached,
    BeginEpoch,
    Disconnected,
    EpochLeft,
    EpochOpened,
    Event,
    Failed,
    Instruction,
    Join,
    Left,
    Regrouped,
    Tick,
    Welcome,
    WindowClosed,
)
from elche.coordination.policies import build_policy
from elche.coordination.policy import Member, Outcome, Policy
from elche.coordination.roster import Roster
from elche.coordination.story import Story
from elche.errors import (
    ConfigError,
    ElcheError,
    NonFiniteError,
    ProtocolError,
    TransitionError,
)


class Coordinator:
    """One run's decisions.

    Args:
        world_size: ranks of the run.
        timeout_s: deadline for ranks to join, until their configuration says its own.
        elastic: go on without a rank that is gone, and take in new ones, where the
            policy can; otherwise the run ends.
        find_guard: imports the guard that a user names.
    """

    def __init__(
        self,
        world_size: int,
        timeout_s: float = 300.0,
        *,
        elastic: bool = False,
        find_guard: FindGuard = no_own_guards,
    ) -> None:
        self._world_size = world_size
        self._find_guard = find_guard
        self._is_elastic = elastic
        self._members = set(range(world_size))
        self._roster = Roster()
        self._first_generation = 0
        self._timeout_s = timeout_s
        self._joins: dict[int, Join] = {}
        self._left: set[int] = set()
        self._policy: Policy | None = None
        self._epoch = -1
        self._in_epoch = False
        self._sizes = BatchSizes(())
        self._opened: dict[int, EpochOpened] = {}
        self._barriers = Barriers()
        self._early_joins: list[Join] = []
        self._ending = EpochEnding()
        self._waiting_since_s: float | None = None
        self._story = Story()
        self.aborted: str | None = None
        self._handlers: dict[type[Event], Callable[..., list[Instruction]]] = {
            Join: self._join,
            EpochOpened: self._open_epoch,
            BarrierReached: self._barrier,
            Failed: self._failed,
            Left: self._leave,
            Disconnected: self._disconnected,
            Tick: self._tick,
            Regrouped: self._regrouped,
        }

    @property
    def _has_changed(self) -> bool:
        """Whether the membership is another one than at the start."""
        return self._roster.generation > self._first_generation

    @property
    def is_finished(self) -> bool:
        """True when every rank has left."""
        return self._left >= self._members

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Takes one event and answers what is to be done.

        Errors of a worker's making (a claim of work that it was not given, a message
        out of turn) end the run with an :class:`Abort` to every rank, as does a
        decision that cannot be made; nothing is raised at the shell.
        """
        self._story.heard(event, now_s)
        if not self._is_heard(event):
            self._story.decided("no such rank in this run", now_s, event.rank)
            return []
        if self.aborted is not None:
            return self._after_abort(event)
        try:
            handler = self._handlers.get(type(event), self._in_policy)
            instructions = self._ending.heard(event)
            instructions += handler(event, now_s)
            instructions += self._make_room()
            if self._roster.newcomers:
                instructions += self._admit(now_s)
                instructions += self._make_room()
        except NonFiniteError as error:
            instructions = self._abort(
                str(error), error.rank, kind="non_finite", batches=error.batches
            )
        except Exception as error:
            what = str(error) if isinstance(error, ElcheError) else repr(error)
            wrapped = TransitionError(what, self.story(event.rank)[-12:])
            instructions = self._abort(str(wrapped), kind="protocol")
        if not isinstance(event, Tick):
            self._waiting_since_s = now_s
        for instruction in instructions:
            self._story.told(instruction, now_s)
        return instructions

    def _is_heard(self, event: Event) -> bool:
        if isinstance(event, Tick) or event.rank in self._members:
            return True
        if isinstance(event, Disconnected):
            return self._roster.withdraw(event.rank)
        return isinstance(event, Join) and self._is_elastic and event.rank >= 0

    def story(self, rank: int | None = None) -> list[str]:
        """What a rank said and was told lately; of all ranks when None."""
        return self._story.of_rank(rank)

    def lease_story(self, batch: int, epoch: int | None = None) -> list[str]:
        """Where a batch was leased and trained on; None is the epoch begun last."""
        return self._story.of_batch(batch, self._epoch if epoch is None else epoch)

    def check(self) -> None:
        """Asserts every invariant; called after each event in tests."""
        assert len(self._members) <= len(self._joins) or self._policy is None
        assert not self._roster.pending - self._members
        if self._policy is not None and self._in_epoch:
            self._policy.check()

    def _join(self, event: Join, now_s: float) -> list[Instruction]:
        if event.version != PROTOCOL_VERSION:
            return self._abort(
                f"rank {event.rank} speaks protocol {event.version}, expected "
                f"{PROTOCOL_VERSION}: install one elche version everywhere"
            )
        if event.rank not in self._members:
            self._roster.newcomers.append(event)
            return [*self._roster.turn_away()] if self.is_finished else []
        if event.rank in self._left:
            self._early_joins.append(event)
            return self._rejoin(now_s) if self.is_finished else []
        if event.rank in self._joins:
            raise ProtocolError(f"rank {event.rank} cannot join again")
        if event.world_size != self._world_size:
            return self._abort(
                f"rank {event.rank} says the world size is {event.world_size}, the "
                f"coordinator serves {self._world_size}",
                kind="mismatch",
            )
        self._joins[event.rank] = event
        if len(self._joins) < self._world_size:
            return []
        joins = [self._joins[rank] for rank in range(self._world_size)]
        difference = disagreement(joins)
        if difference:
            return self._abort(difference, kind="mismatch")
        settings = settings_of(joins[0])
        config = RunConfig(**settings.config)
        self._timeout_s = config.timeout_s
        members = [
            Member(join.rank, join.device, join.horizon_batches) for join in joins
        ]
        try:
            make_guard = guard_maker(config.guard_setting, self._find_guard)
        except ConfigError as error:
            return self._abort(str(error), kind="config")
        self._policy = build_policy(config, members, settings, make_guard)
        devices = tuple(join.device for join in joins)
        self._roster.generation += 1
        self._first_generation = self._roster.generation
        return [
            Welcome(rank=rank, generation=self._roster.generation, devices=devices)
            for rank in sorted(self._members)
        ]

    def _rejoin(self, now_s: float) -> list[Instruction]:
        """Every rank has left: the same processes may begin another run."""
        self._joins.clear()
        self._left.clear()
        self._members = set(range(self._world_size))
        self._policy = None
        self._epoch = -1
        self._in_epoch = False
        early, self._early_joins = self._early_joins, []
        return [told for join in early for told in self._join(join, now_s)]

    def _open_epoch(self, event: EpochOpened, now_s: float) -> list[Instruction]:
        self._running_policy()
        if self._left:
            return self._abort(
                f"rank {event.rank} opens epoch {event.epoch}, but ranks "
                f"{sorted(self._left)} have left: run the same epochs on every rank"
            )
        again = event.rank in self._opened and not self._has_changed
        if event.epoch != self._epoch + 1 or again:
            raise ProtocolError(
                f"rank {event.rank} opens epoch {event.epoch}, expected "
                f"{self._epoch + 1}, once"
            )
        self._opened[event.rank] = event
        return self._begin_if_open(now_s)

    def _begin_if_open(self, now_s: float) -> list[Instruction]:
        """Begins the epoch when all members have opened it."""
        policy = self._running_policy()
        if not self._opened.keys() >= self._members or self._roster.pending:
            return []
        if self._in_epoch:
            raise ProtocolError(f"epoch {self._epoch} has not ended on every rank")
        difference = opened_differently(self._opened)
        if difference:
            return self._abort(difference, kind="mismatch")
        speaker = self._opened[min(self._opened)]
        if not speaker.sizes:
            if self._has_changed:
                return []  # it opens the epoch again when it has regrouped
            raise ProtocolError("rank 0 opened the epoch without batch sizes")
        policy.prepare_epoch(
            max(opened.probe_s for opened in self._opened.values()),
            alike=len({opened.rates for opened in self._opened.values()}) == 1,
        )
        self._opened = {}
        self._epoch += 1
        self._in_epoch = True
        self._sizes = BatchSizes(speaker.sizes)
        begin: list[Instruction] = [
            replace(self._begin_epoch_for(rank), state_from=policy.state_from)
            for rank in sorted(self._members)
        ]
        outcome = policy.begin_epoch(self._epoch, self._sizes, now_s, speaker.plan)
        return begin + self._settle(outcome, now_s)

    def _begin_epoch_for(self, rank: int) -> BeginEpoch:
        return BeginEpoch(
            rank=rank,
            epoch=self._epoch,
            sizes=self._sizes.runs,
            policy=self._running_policy().name,
            window=self._running_policy().first_window,
        )

    def _in_policy(self, event: Event, now_s: float) -> list[Instruction]:
        policy = self._running_policy()
        if not self._in_epoch:
            if isinstance(event, EpochLeft):
                return []
            if isinstance(event, WindowClosed) and event.epoch == self._epoch:
                return []  # overlapped: an empty window begun before the last was over
            raise ProtocolError(f"{type(event).__name__} outside an epoch")
        return self._settle(policy.handle(event, now_s), now_s)

    def _settle(self, outcome: Outcome, now_s: float) -> list[Instruction]:
        for note in outcome.notes:
            self._story.decided(note, now_s)
        if outcome.epoch_over:
            self._in_epoch = False
            policy = self._running_policy()
            left = {rank for rank in self._members if policy.has_left(rank)}
            return self._ending.end(outcome.instructions, left, self._members)
        return outcome.instructions

    def _barrier(self, event: BarrierReached, now_s: float) -> list[Instruction]:
        if self._left:
            return self._abort(
                f"rank {event.rank} waits at barrier {event.name!r}, but ranks "
                f"{sorted(self._left)} have left"
            )
        self._barriers.reach(event)
        return self._barriers.passed(self._members)

    def _failed(self, event: Failed, now_s: float) -> list[Instruction]:
        return self._abort(
            f"rank {event.rank} failed: {event.error}", event.rank, event.traceback
        )

    def _leave(self, event: Left, now_s: float) -> list[Instruction]:
        if self._can_lose(event.rank) and self._in_epoch:
            return self._lose(event.rank, now_s)
        self._left.add(event.rank)
        if self.is_finished:
            turned_away = self._roster.turn_away()
            again = self._rejoin(now_s) if self._early_joins else []
            return [*turned_away, *again]
        owes = self._in_epoch and (
            self._policy is None or self._policy.owes(event.rank)
        )
        if owes or self._opened or self._barriers:
            return self._abort(
                f"rank {event.rank} has left while others were {self._doing()}"
            )
        return []

    def _disconnected(self, event: Disconnected, now_s: float) -> list[Instruction]:
        if event.rank in self._left or self.is_finished:
            return []
        if event.rank not in self._members:
            return []  # it waited to be taken in
        if self._can_lose(event.rank):
            return self._lose(event.rank, now_s)
        if self._is_elastic and self._left and not self._in_epoch:
            return self._leave(Left(rank=event.rank), now_s)  # all is committed
        return self._abort(
            f"rank {event.rank} is gone: its connection ended while the run was "
            f"{self._doing()}; look at that rank's own output",
            event.rank,
        )

    def _can_lose(self, rank: int) -> bool:
        """Whether the run goes on without a rank."""
        policy = self._policy
        able = self._is_elastic and policy is not None and policy.is_elastic
        return able and len(self._members) > 1 and not self._left

    def _lose(self, rank: int, now_s: float) -> list[Instruction]:
        """A rank is gone: the others form a new group without it."""
        self._members.discard(rank)
        self._opened.pop(rank, None)
        self._barriers.remove(rank)
        self._story.decided("gone; the others go on", now_s, rank)
        self._running_policy().remove(rank)
        self._roster.change(self._members)
        told = self._ending.confirm(rank)
        return [*told, *self._roster.regroup(self._members, left=(rank,))]

    def _make_room(self) -> list[Instruction]:
        """Says whether ranks wait to be taken in, which may take some preparation."""
        if self._policy is None or not self._is_elastic:
            return []
        return self._policy.make_room(bool(self._roster.newcomers))

    def _admit(self, now_s: float) -> list[Instruction]:
        """Takes in ranks that have come, when nothing is under way with the others."""
        policy = self._policy
        quiet = policy is not None and self._in_epoch and policy.is_quiet
        if policy is None or not quiet or self._roster.pending:
            return []
        first = next(iter(self._joins.values()))
        joins, refused = self._roster.choose(first, self._members)
        if not joins:
            return [*refused]
        old = sorted(self._members)
        for join in joins:
            self._joins[join.rank] = join
            self._members.add(join.rank)
            policy.add(Member(join.rank, join.device, join.horizon_batches))
            self._story.decided("joins", now_s, join.rank)
        self._roster.change(self._members)
        generation = self._roster.generation
        joined = tuple(join.rank for join in joins)
        devices = tuple(self._joins[rank].device for rank in sorted(self._members))
        return [
            *refused,
            *self._roster.regroup(old, joined=joined),
            *(
                Welcome(rank=rank, generation=generation, devices=devices)
                for rank in joined
            ),
            *(self._begin_epoch_for(rank) for rank in joined),
        ]

    def _regrouped(self, event: Regrouped, now_s: float) -> list[Instruction]:
        if not self._roster.take(event):
            return []
        if self._in_epoch:
            outcome = self._running_policy().regrouped(self._roster.reduced, now_s)
            return self._settle(outcome, now_s)
        return [*self._barriers.passed(self._members), *self._begin_if_open(now_s)]

    def _tick(self, event: Tick, now_s: float) -> list[Instruction]:
        if self._waiting_since_s is None or not self._is_waiting():
            self._waiting_since_s = now_s
            return []
        patience_s = self._timeout_s
        if self._policy is not None and self._in_epoch:
            patience_s = min(patience_s, self._policy.patience_s())
        if now_s - self._waiting_since_s < patience_s:
            return []
        return self._abort(
            f"nothing came for {patience_s:g} s while the run was "
            f"{self._doing()}; raise timeout_s if a batch really takes so long",
            kind="deadline",
        )

    def _is_waiting(self) -> bool:
        """Whether somebody waits for somebody: between epochs ranks may be idle."""
        joining = 0 < len(self._joins) < self._world_size
        held = bool(
            self._opened
            or self._barriers
            or self._ending.withholds
            or self._roster.pending
        )
        return joining or self._in_epoch or held

    def _doing(self) -> str:
        if self._policy is None:
            missing = sorted(self._members - set(self._joins))
            return f"waiting for ranks {missing} to join"
        if self._opened and not self._in_epoch:
            missing = sorted(self._members - set(self._opened))
            return f"waiting for ranks {missing} to open epoch {self._epoch + 1}"
        if self._barriers:
            return f"waiting for {self._barriers.waiting_for(self._members)}"
        if self._in_epoch:
            return f"waiting for {self._policy.waiting_for()}"
        return "between epochs"

    def _abort(
        self,
        reason: str,
        failed_rank: int | None = None,
        traceback: str = "",
        kind: str = "remote",
        batches: tuple[Range, ...] = (),
    ) -> list[Instruction]:
        self.aborted = reason
        self._abort_message = Abort(
            rank=-1,
            reason=reason,
            failed_rank=failed_rank,
            traceback=traceback,
            kind=kind,
            batches=batches,
        )
        waiting = {join.rank for join in self._roster.take_newcomers()}
        return [self._abort_for(rank) for rank in sorted(self._members | waiting)]

    def _abort_for(self, rank: int) -> Abort:
        return replace(self._abort_message, rank=rank)

    def _after_abort(self, event: Event) -> list[Instruction]:
        if isinstance(event, (Left, Disconnected)):
            self._left.add(event.rank)
            return []
        if isinstance(event, (Join, EpochOpened, BarrierReached)):
            return [self._abort_for(event.rank)]
        return []

    def _running_policy(self) -> Policy:
        if self._policy is None:
            raise ProtocolError("a message before all ranks have joined")
        return self._policy
