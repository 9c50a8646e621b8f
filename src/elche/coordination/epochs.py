"""Epochs of a run: all ranks open them, a policy decides inside them. Pure."""

from __future__ import annotations

from dataclasses import replace

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import opened_differently
from elche.coordination.gathering import EpochEnding
from elche.coordination.membership import Membership, as_members, refusal
from elche.coordination.policy import EpochTotals, Outcome, Policy, PolicyChooser, Steps
from elche.coordination.protocol.events import (
    EpochCut,
    EpochLeft,
    EpochOpened,
    Event,
    PassBegun,
    WindowClosed,
)
from elche.coordination.protocol.instructions import (
    BeginEpoch,
    EndEpoch,
    Instruction,
    MetricsReported,
    PolicyChosen,
)
from elche.coordination.story import Story
from elche.errors import MismatchError, ProtocolError


class Epochs:
    """Progress of a run through its epochs.

    Args:
        chooser: owner of the policy that decides inside an epoch.
        membership: ranks of the run.
        story: log of decisions.

    Attributes:
        ending: handler of an epoch's end, which may be delayed.
        number: number of the latest epoch, -1 before the first.
        is_under_way: whether that epoch has not ended yet.
    """

    def __init__(
        self, chooser: PolicyChooser, membership: Membership, story: Story
    ) -> None:
        self.chooser = chooser
        self._membership = membership
        self._story = story
        self.number = -1
        self.is_under_way = False
        self._opened: dict[int, EpochOpened] = {}
        self._is_cut = self._is_end = False
        self._before: EpochTotals | None = None
        self.ending = EpochEnding()

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.chooser.policy

    @property
    def is_opening(self) -> bool:
        """True if ranks have opened the next epoch and wait for the others."""
        return bool(self._opened)

    @property
    def is_paused(self) -> bool:
        """True if all ranks wait to continue an epoch that was cut."""
        has_all = self._opened.keys() >= self._membership.ranks
        return self._before is not None and not self.is_under_way and has_all

    def cut(self, now_s: float) -> Steps:
        """Cuts the current epoch, as for a checkpoint."""
        first = min(self._membership.ranks)
        return self.handle(EpochCut(rank=first, epoch=self.number), now_s)

    def open(self, event: EpochOpened, now_s: float) -> Steps:
        """Records a rank's request for an epoch; begins it after the last request.

        A newcomer that opens it differently is rejected, and the others continue.

        Raises:
            MismatchError: ranks open the epoch differently.
            ProtocolError: the epoch is not the next one, or was requested before.
        """
        if event.rank in self._membership.fresh:
            before = {r: each for r, each in self._opened.items() if r < event.rank}
            if difference := opened_differently({**before, event.rank: event}):
                return iter([refusal(event.rank, difference)])
        again = event.rank in self._opened and not self._membership.has_changed
        expected = self.number + (not event.continues)
        if event.continues and self.number < 0:
            expected = event.epoch
        if event.epoch != expected or again:
            raise ProtocolError(
                f"rank {event.rank} opens epoch {event.epoch}, expected "
                f"{expected}, once"
            )
        self._opened[event.rank] = event
        return self._begin_if_open(now_s)

    def _begin_if_open(self, now_s: float) -> Steps:
        """Begins the epoch when all members have opened it."""
        ranks = self._membership.ranks
        if not self._opened.keys() >= ranks or self._membership.pending:
            return
        if self.is_paused and self._membership.awaits_cut:
            return  # newcomers are admitted first
        if self.is_under_way:
            raise ProtocolError(f"epoch {self.number} has not ended on every rank")
        if difference := opened_differently(self._opened):
            raise MismatchError(difference)
        speaker = self._opened[min(self._opened)]
        if not speaker.sizes:
            if self._membership.has_changed:
                return  # the rank opens the epoch again after the regroup
            raise ProtocolError("rank 0 opened the epoch without batch sizes")
        rates = {opened.rates for opened in self._opened.values()}
        self.chooser.prepare(
            max(opened.probe_s for opened in self._opened.values()),
            now_s,
            # In windows each rank's schedulers run on alone to the epoch's end.
            alike=len(rates) == 1 and not speaker.continues,
        )
        self._membership.fresh.clear()
        self._opened = {}
        self.number = speaker.epoch
        self.is_under_way, self._is_cut, self._is_end = True, False, False
        sizes = BatchSizes(speaker.sizes)
        begun = BeginEpoch(
            rank=0,
            epoch=self.number,
            sizes=sizes.runs,
            policy=self.policy.name,
            window=self.policy.first_window,
            cut=self.policy.cut.to_wire(),
            state_from=self.chooser.state_from,
        )
        for rank in sorted(ranks):
            yield replace(begun, rank=rank)
        outcome = self.chooser.begin_epoch(self.number, sizes, now_s)
        if self._before is not None and speaker.continues:
            self.policy.totals.follow(self._before)
        self._before = None
        yield from self._settle(outcome, now_s)

    def handle(self, event: Event, now_s: float) -> Steps:
        """Dispatches an event to the policy.

        Raises:
            ProtocolError: the event belongs to no epoch.
        """
        if not self.is_under_way:
            if isinstance(event, (EpochLeft, EpochCut, PassBegun)):
                return iter(())
            if isinstance(event, WindowClosed) and event.epoch == self.number:
                # Overlapped: an empty window that began before the last one ended.
                return iter(())
            raise ProtocolError(f"{type(event).__name__} outside an epoch")
        if isinstance(event, EpochCut):
            if event.epoch > self.number:
                raise ProtocolError(f"rank {event.rank} cuts epoch {event.epoch}")
            if event.epoch < self.number:
                return iter(())  # sent before EndEpoch arrived
            is_again, self._is_cut = self._is_cut, True
            self._is_end |= event.is_end
            if is_again or any(map(self.policy.has_left, self._membership.ranks)):
                return iter(())  # it ends already
        return self._settle(self.policy.handle(event, now_s), now_s)

    def _settle(self, outcome: Outcome, now_s: float) -> Steps:
        chosen = (one for one in outcome.instructions if isinstance(one, PolicyChosen))
        for note in (*outcome.notes, *(one.reason for one in chosen)):
            self._story.decided(note, now_s)
        if outcome.epoch_over:
            self.is_under_way = False
            ranks = self._membership.ranks
            left = {rank for rank in ranks if self.policy.has_left(rank)}
            is_cut = self._is_cut or self.policy.is_cut
            rest = () if left or not is_cut else self.policy.positions_left
            steps = self.policy.steps_left
            is_end = bool(left or (rest and self._is_end))
            has_rest = bool(rest) and not is_end
            if has_rest:
                self._before = self.policy.totals
            if left or rest:
                replies = [
                    replace(one, is_early=is_end, left=rest, steps=steps)
                    if isinstance(one, EndEpoch)
                    else one
                    for one in outcome.instructions
                    if not (
                        has_rest and isinstance(one, MetricsReported) and one.window < 0
                    )
                ]
                yield from self.ending.end(replies, left, ranks, now_s)
                return
        yield from outcome.instructions

    def lose(self, rank: int) -> list[Instruction]:
        """Removes a lost rank; returns instructions held back until it reported."""
        self._opened.pop(rank, None)
        self.chooser.remove(rank)
        return self.ending.confirm(rank)

    def admit_newcomers(self, now_s: float) -> Steps:
        """Admits ready newcomers where all ranks pause, after cutting the epoch."""
        membership = self._membership
        # Before the cut, since the whole epoch may be granted already.
        yield from self.policy.make_room(membership.awaits_cut)
        if not membership.awaits_cut:
            return
        if self.is_under_way:
            yield from self.cut(now_s)
        elif self.is_paused and membership.ready:
            joins, replies = membership.admit_ready()
            for member in as_members(joins):
                self._story.decided("joins", now_s, member.rank)
                self.chooser.add(member)
            yield from replies

    def regrouped(self, now_s: float) -> Steps:
        """Continues after all members have formed their group; may cut the epoch."""
        if not self.is_under_way:
            yield from self._begin_if_open(now_s)
            return
        reduced = self._membership.reduced
        yield from self._settle(self.policy.regrouped(reduced, now_s), now_s)
        if self.is_under_way and self.policy.is_outdated:
            yield from self.cut(now_s)

    def waiting_to_open(self) -> str:
        """Names the ranks that have not opened the next epoch."""
        members = self._membership
        missing = sorted(members.ranks - set(self._opened))
        if members.is_short and not missing:
            return (
                f"newcomers: {len(members.ranks)} live, min_ranks={members.min_ranks}"
            )
        return f"ranks {missing} to open epoch {self.number + 1}"
