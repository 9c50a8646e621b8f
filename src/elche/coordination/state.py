"""The coordination core: ``handle(event, now_s) -> instructions``.

`elche.coordination.membership` holds the ranks, `elche.coordination.epochs` the epochs,
a policy decides inside an epoch, and `elche.coordination.run_end` ends a run. This
module dispatches each event to them. The core never reads a clock and never does I/O:
the shell (`elche.runtime.process.coordinator`) passes in events and executes the
instructions. Each decision is logged in the story, which every error prints.

Every departure of a rank takes one path (`Coordinator._gone`), whatever the cause:
`fatal_loss` decides whether the run survives it, and `membership.TABLE` gives the next
state. No transition, no effect. If a connection ends when others have left and all is
committed, its rank counts as left. Messages of lost ranks are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import TypeAlias

from elche.coordination.agreement import (
    Settings,
    disagreement,
    left_before,
    settings_of,
)
from elche.coordination.auto.auto_chooser import AutoChooser
from elche.coordination.auto.windows_advice import AdvisedSync
from elche.coordination.epochs import Epochs
from elche.coordination.fatal_losses import RunFacts, fatal_loss, fatal_setting
from elche.coordination.gathering import Barriers
from elche.coordination.membership import (
    Membership,
    RankState,
    as_members,
    cause_of,
    next_state,
)
from elche.coordination.policy import Member, PolicyChooser, Steps
from elche.coordination.protocol.events import (
    BarrierReached,
    CheckpointSaved,
    DefaultGroupFormed,
    EpochOpened,
    Event,
    Failed,
    Interrupted,
    Join,
    JoinReady,
    Left,
    RankLost,
    Regrouped,
    ReplicasFormed,
    Tick,
)
from elche.coordination.protocol.instructions import Instruction
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.coordination.run_end import Deadline, RunEnd
from elche.coordination.story import Story
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.coordination.windows.window_policy import WindowPolicy
from elche.errors import ProtocolError

RESTART = "`elche run --max-restarts` restarts such a run from its last checkpoint"

_Replies: TypeAlias = Iterable[Instruction]


class Coordinator:
    """Coordinator of one run: turns events into instructions.

    Args:
        world_size: number of ranks in the run.
        survives: continue without lost ranks once epochs have begun, and admit new
            ranks where an epoch is cut, if the settings allow it.

    Attributes:
        lost: lost ranks that the run survived.
        silent: lost ranks that were silent, and had to be killed.
    """

    def __init__(self, world_size: int, *, survives: bool = False) -> None:
        self.lost: set[int] = set()
        self.silent: set[int] = set()
        self._membership = Membership(world_size, grows=survives)
        self._epochs: Epochs | None = None
        self._replicas: tuple[tuple[int, ...], ...] = ()
        self._barriers = Barriers()
        self._run = RunFacts(has_launcher=survives)
        self._deadline = Deadline(self._membership, self._barriers)
        self._end = RunEnd(self._membership)
        self._story = Story()
        self._handlers: dict[type[Event], Callable[..., _Replies]] = {
            Join: self._join,
            JoinReady: self._be_ready,
            EpochOpened: self._open_epoch,
            BarrierReached: self._barrier,
            DefaultGroupFormed: self._note_default_group,
            ReplicasFormed: self._note_replicas,
            CheckpointSaved: self._note_saved,
            Failed: self._gone,
            Left: self._gone,
            RankLost: self._gone,
            Tick: self._tick,
            Interrupted: self._interrupted,
            Regrouped: self._regrouped,
        }

    @property
    def is_finished(self) -> bool:
        """True if every rank has left."""
        return self._membership.is_finished

    @property
    def members(self) -> Set[int]:
        """Ranks that are in the run, or have left it cleanly."""
        return self._membership.ranks

    @property
    def devices(self) -> dict[int, str]:
        """Device of each rank that has joined."""
        return self._membership.devices

    @property
    def waiting_since_s(self) -> float | None:
        """Time of the last message if ranks wait for others; None if none waits."""
        return self._deadline.since_s(self._epochs)

    @property
    def doing(self) -> str:
        """Description of the run's current activity."""
        return self._deadline.doing(self._epochs)

    @property
    def aborted(self) -> str | None:
        """Reason of the run's end; None before it."""
        return self._end.reason

    @property
    def why_closed(self) -> str:
        """Reason why no rank can join the run now; "" if one can."""
        if self._epochs is None or self._membership.left or self.aborted is not None:
            return "that has not begun, or is at its end"
        setting = self._fatal_setting
        return f"no rank can join {setting}" if setting else ""

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Handles one event; returns the instructions to send.

        Errors of a worker (a false claim of work, a message out of turn) end the run
        with an :class:`Abort` to every rank. So does a failed decision. No
        exception reaches the shell.
        """
        self._story.received(event, now_s)
        if not self._membership.accepts(event):
            self._story.decided("no such rank in this run", now_s, event.rank)
            return []
        if self.aborted is not None:
            return self._end.answer(event)
        try:
            instructions = [*self._answer(event, now_s)]
        except Exception as error:
            instructions = self._end.refuse(error, self.story(event.rank)[-12:])
        if not isinstance(event, Tick):
            self._deadline.last_message_s = now_s
        for instruction in instructions:
            self._story.sent(instruction, now_s)
        return instructions

    def _answer(self, event: Event, now_s: float) -> Steps:
        handler = self._handlers.get(type(event), self._in_epoch)
        if self._epochs is not None:
            yield from self._epochs.ending.release_on(event)
        yield from handler(event, now_s)
        if self._epochs is not None:
            yield from self._epochs.admit_newcomers(now_s)

    def story(self, rank: int | None = None) -> list[str]:
        """Returns recent messages from and to a rank; of all ranks if None."""
        return self._story.of_rank(rank)

    def lease_story(self, batch: int, epoch: int | None = None) -> list[str]:
        """Returns messages that leased or trained a batch; epoch None: the latest."""
        if epoch is None:
            epoch = -1 if self._epochs is None else self._epochs.number
        return self._story.of_batch(batch, epoch)

    def check(self) -> None:
        """Asserts every invariant; called after each event in tests."""
        if self._epochs is not None:
            self._membership.check()
            if self._epochs.is_under_way:
                self._epochs.policy.check()

    def _join(self, event: Join, now_s: float) -> _Replies:
        if event.rank not in self._membership.ranks:
            return self._membership.greet(event, self.why_closed)
        if event.version != PROTOCOL_VERSION:
            return self._end.abort(
                f"rank {event.rank} uses protocol version {event.version}, expected "
                f"{PROTOCOL_VERSION}: install one elche version everywhere"
            )
        if event.rank in self._membership.left:  # early for the next run
            self._membership.early.append(event)
            return self._begin_next_run(now_s) if self.is_finished else []
        if difference := self._membership.take(event):
            return self._end.abort(difference, kind="mismatch")
        return self._begin_run() if self._membership.is_complete else []

    def _be_ready(self, event: JoinReady, now_s: float) -> list[Instruction]:
        """Notes that a newcomer can join, so the epoch is cut for it."""
        if event.rank in self._membership.ranks:
            raise ProtocolError(f"rank {event.rank} is in the run")
        self._membership.ready.add(event.rank)
        return []

    def _begin_run(self) -> Steps:
        """Begins the run after all ranks have joined."""
        joins = self._membership.joined()
        if difference := disagreement(joins):
            yield from self._end.abort(difference, kind="mismatch")
            return
        settings = settings_of(joins[0])
        self._deadline.timeout_s = settings.config.timeout_s
        self._run = replace(self._run, settings=settings)
        self._membership.min_ranks = settings.config.min_ranks
        if self._membership.is_short:
            yield from self._end.abort(
                f"expected min_ranks of at most {len(joins)}, the ranks at the run's "
                f"start, got {settings.config.min_ranks}",
                kind="config",
            )
            return
        chooser = policy_chooser(as_members(joins), settings)
        self._epochs = Epochs(chooser, self._membership, self._story)
        yield from self._membership.begin(survives=not self._fatal_setting)

    def _begin_next_run(self, now_s: float) -> list[Instruction]:
        """Starts another run of the same processes, if ranks have joined it already."""
        replies = self._membership.reject_newcomers()
        if self._membership.early:
            if self._membership.has_changed:
                return self._end.abort(
                    "ranks died, left or joined in the previous run, but another "
                    "elche.setup in the same processes needs its first ranks"
                )
            self._epochs = None
            for join in self._membership.begin_again():
                replies += self._join(join, now_s)
        return replies

    def _open_epoch(self, event: EpochOpened, now_s: float) -> _Replies:
        epochs = self._running()
        if self._membership.left:
            return self._end.abort(left_before(event, self._membership.left))
        self._run = replace(self._run, backend=event.backend)
        return epochs.open(event, now_s)

    def _in_epoch(self, event: Event, now_s: float) -> Steps:
        return self._running().handle(event, now_s)

    def _note_saved(self, event: CheckpointSaved, now_s: float) -> list[Instruction]:
        return []

    def _note_default_group(self, event: Event, now_s: float) -> list[Instruction]:
        self._run = replace(self._run, has_default_group=True)
        return []

    def _note_replicas(self, event: ReplicasFormed, now_s: float) -> list[Instruction]:
        self._membership.left.pop(event.rank, None)  # an earlier pipeline
        lost = self.lost  # one may have died while others announced it
        self._replicas = tuple(r for r in event.replicas if lost.isdisjoint(r))
        return []

    def _barrier(self, event: BarrierReached, now_s: float) -> list[Instruction]:
        if self._membership.left:
            return self._end.abort(
                f"rank {event.rank} waits at barrier {event.name!r}, but ranks "
                f"{sorted(self._membership.left)} have left"
            )
        self._barriers.reach(event)
        return self._barriers.passed(self._membership.ranks)

    def _interrupted(self, event: Interrupted, now_s: float) -> list[Instruction]:
        return self._end.abort(f"interrupted: the launcher received {event.by}")

    def _gone(self, event: Left | Failed | RankLost, now_s: float) -> list[Instruction]:
        """Handles a rank's departure, whatever the cause, by `membership.TABLE`."""
        rank, cause, membership = event.rank, cause_of(event), self._membership
        if isinstance(event, RankLost) and (replica := self._replica_without(rank)):
            return self._lose_replica(rank, replica, cause, now_s)
        before, fatal = membership.state_of(rank), self._fatal_loss(rank)
        after = next_state(before, cause, survives=not fatal)
        if after is before:
            return []
        if before is RankState.WAITING:
            membership.withdraw(rank)
            return []
        if after is RankState.LOST:
            if isinstance(event, Failed):
                self._story.decided(f"failed: {event.error}", now_s, rank)
            return self._lose(rank, cause, now_s)
        if isinstance(event, Failed):
            return self._end.fail(event)
        if isinstance(event, Left):
            return self._leave(event, now_s)
        if self._is_over:
            return self._leave(Left(rank=rank), now_s)
        return self._end.abort(
            f"rank {rank} is gone: its connection ended while the run was "
            f"{self.doing}; look at that rank's own output ({fatal}; {RESTART})",
            rank,
        )

    def _leave(self, event: Left, now_s: float) -> list[Instruction]:
        """Handles a rank that leaves cleanly; an error if others wait for it."""
        self._replicas = ()
        replies = self._membership.leave(event)
        if self.is_finished:
            return self._begin_next_run(now_s)
        epochs = self._epochs
        is_missed = epochs and (epochs.is_under_way or epochs.is_opening)
        if is_missed or self._barriers:
            return self._end.abort(
                f"rank {event.rank} has left while others were {self.doing}"
            )
        return replies

    def _lose(self, rank: int, cause: str, now_s: float) -> list[Instruction]:
        """Handles a lost rank: the others form a new group without it."""
        self.lost.add(rank)
        if cause == "silent":
            self.silent.add(rank)
        self._story.decided(f"lost ({cause}); the others continue", now_s, rank)
        self._barriers.remove(rank)
        replies = self._running().lose(rank)
        return [*replies, *self._membership.lose(rank)]

    def _replica_without(self, rank: int) -> tuple[int, ...]:
        """Ranks of a pipeline's replica that the others can lose; () if they cannot."""
        run, replicas = self._run, self._replicas
        if len(replicas) < 2 or not run.has_launcher or run.has_default_group:
            return ()
        if self._membership.left or self._epochs is not None:
            return ()
        return next((members for members in replicas if rank in members), ())

    def _lose_replica(
        self, rank: int, replica: tuple[int, ...], cause: str, now_s: float
    ) -> list[Instruction]:
        """Handles a lost rank of a replica; all ranks of the replica are fenced."""
        self.lost.update(replica)
        self.silent.update(replica if cause == "silent" else ())
        self._replicas = tuple(one for one in self._replicas if one != replica)
        text = f"lost ({cause}) with its replica {replica}; the others continue"
        self._story.decided(text, now_s, rank)
        return self._membership.lose_replica(replica)

    def survives(self, rank: int) -> bool:
        """Returns True if the run would survive the loss of this rank now."""
        return bool(self._replica_without(rank)) or not self._fatal_loss(rank)

    def _fatal_loss(self, rank: int) -> str:
        """Returns the reason why a rank's loss ends the run; "" if it does not."""
        membership, epochs = self._membership, self._epochs
        facts = replace(
            self._run, ranks=membership.ranks, has_left=bool(membership.left)
        )
        if epochs is not None:
            limits = epochs.chooser.loss_limits
            facts = replace(facts, epoch=epochs.number, limits=limits)
        return fatal_loss(rank, facts)

    @property
    def _is_over(self) -> bool:
        """True if ranks have left cleanly and all trained work is committed."""
        is_between = self._epochs is None or not self._epochs.is_under_way
        return not self._fatal_setting and bool(self._membership.left) and is_between

    @property
    def _fatal_setting(self) -> str:
        return fatal_setting(self._run)

    def _regrouped(self, event: Regrouped, now_s: float) -> Steps:
        epochs, membership = self._running(), self._membership
        is_last = membership.arrive(event)
        if event.generation == membership.generation:
            epochs.policy.arrived(event.rank, event.lost)
        if not is_last:
            return
        yield from self._barriers.passed(membership.ranks)
        yield from epochs.regrouped(now_s)

    def _tick(self, event: Tick, now_s: float) -> list[Instruction]:
        if why := self._deadline.exceeded(self._epochs, now_s):
            return self._end.abort(why, kind="deadline")
        return [] if self._epochs is None else self._epochs.ending.release(now_s)

    def _running(self) -> Epochs:
        if self._epochs is None:
            raise ProtocolError("a message before all ranks have joined")
        return self._epochs


def policy_chooser(members: Sequence[Member], settings: Settings) -> PolicyChooser:
    """Creates the owner of the policy that the settings name."""
    config = settings.config
    if config.policy == "auto":
        return AutoChooser(members, settings)
    if config.policy == "sync":
        is_advised = settings.is_default and not config.debug.deterministic
        if is_advised and len(members) > 1:
            return AdvisedSync(members, settings)
        return PolicyChooser(SyncPolicy(members, settings))
    epochs, cut_for = settings.epochs, settings.cut_for
    return PolicyChooser(WindowPolicy(config, members, epochs, cut_for=cut_for))
