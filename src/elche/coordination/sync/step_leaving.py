"""Early exits from an epoch of ``sync``. Pure.

If a loop leaves early, the others still run all granted steps. The rank that left
contributes zeros to their reductions, but only in backward passes that all the others
have begun; these are reported to it. So all ranks know of its exit before such a pass
ends, and exclude its share from the mean. Ranks with different steps than the others
copy the model before the epoch ends:

    no rank left ── EpochLeft ──► leaving ── granted steps done, or all have left ──►
        over, if all left with the same model; else copying one ──► over
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import final

from elche.coordination.accounts.model_checks import ModelChecks
from elche.coordination.protocol.events import EpochLeft, PassBegun, StepsDone
from elche.coordination.protocol.instructions import Instruction, JoinPasses, RankLeft
from elche.errors import ConfigError, ProtocolError

SAME_PASSES = (
    "gradients are summed pass by pass, so every rank must run as many backward passes "
    "for each batch: agree on what to skip (if elche.any(is_bad): continue), or on the "
    "number of passes (elche.all_gather)"
)


@final
class EarlyEnd:
    """Ranks that have left an epoch early, and ranks that wait in a pass.

    Args:
        policy: policy as set by the user.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._left: dict[int, EpochLeft] = {}
        self._begun: dict[int, PassBegun] = {}
        self._waits: dict[int, PassBegun] = {}
        self._done: dict[int, StepsDone] = {}
        self._is_settled = False

    def __bool__(self) -> bool:
        """True if any rank has left."""
        return bool(self._left)

    def __contains__(self, rank: int) -> bool:
        """True if this rank has left."""
        return rank in self._left

    @property
    def under(self) -> str:
        """Policy as text; for ``auto`` with the reason why its steps are common."""
        if self._policy == "auto":
            return (
                "under policy 'auto', which trains in common steps, as 'sync' does, "
                "until it has chosen windows,"
            )
        return f"under policy {self._policy!r}"

    @property
    def step(self) -> int:
        """Number of steps run by the rank that left last."""
        return max(event.step for event in self._left.values())

    def done(self, event: StepsDone) -> None:
        """Records that a rank has ended steps.

        Raises:
            ConfigError: another rank waits in a pass that this rank has not run.
        """
        self._done[event.rank] = event
        for begun in self._waits.values():
            self._compare(event, begun)

    def completed(self, stop: int) -> None:
        """Drops waits in steps before ``stop``, which all ranks have ended."""
        self._waits = {r: each for r, each in self._waits.items() if each.step > stop}

    def _compare(self, done: StepsDone, begun: PassBegun) -> None:
        if begun.step <= done.stop and begun.passes > done.backward_passes:
            raise ConfigError(
                f"rank {begun.rank} waits in backward pass {begun.passes} of the run, "
                f"in step {begun.step - 1} of epoch {begun.epoch}, but rank "
                f"{done.rank} ended that step after {done.backward_passes}; "
                f"{self.under} {SAME_PASSES}"
            )

    def staying(self, members: Iterable[int]) -> list[int]:
        """Returns the members that have not left."""
        return sorted(set(members) - self._left.keys())

    def take(self, event: EpochLeft, members: Iterable[int]) -> list[Instruction]:
        """Records a rank that leaves; notified ranks then report their positions."""
        self._left[event.rank] = event
        self._begun.clear()
        return [
            RankLeft(rank=r, epoch=event.epoch, gone=event.rank, passes=event.passes)
            for r in self.staying(members)
        ]

    def begun(self, event: PassBegun, members: Iterable[int]) -> list[Instruction]:
        """Records a staying rank's progress; after all reports, the leavers may join.

        Raises:
            ProtocolError: the rank began a pass that a rank which left cannot join.
            ConfigError: see `done`.
        """
        self._waits[event.rank] = event
        for done in self._done.values():
            self._compare(done, event)
        if event.rank in self._left or event.gone != len(self._left):
            return []
        for rank, left in self._left.items():
            is_ahead = event.step > left.step or event.passes > left.passes
            if left.apart and is_ahead:
                raise ProtocolError(
                    f"rank {rank} left epoch {event.epoch} after step {left.step}, and "
                    f"rank {event.rank} did not; {left.apart}; leave it after the same "
                    "step on every rank"
                )
        self._begun[event.rank] = event
        if self._begun.keys() < set(self.staying(members)):
            return []
        last = max(self._begun.values(), key=lambda begun: begun.passes)
        return [
            JoinPasses(rank=r, epoch=last.epoch, step=last.step, passes=last.passes)
            for r, left in sorted(self._left.items())
            if left.passes < last.passes
        ]

    def settle(self, members: Set[int], *, is_needed: bool) -> int | None:
        """Returns, once, the rank whose model all copy after the granted steps.

        That rank has run all of them, or has left last.

        Args:
            members: ranks that have taken part and lack no state.
            is_needed: whether other ranks need the model even if these hold equal ones.

        Returns:
            The rank; None if all hold one model, or have been instructed already.

        Raises:
            MismatchError: models differ after equal numbers of steps.
        """
        if self._is_settled:
            return None
        self._is_settled = True
        if staying := self.staying(members):
            return staying[0]
        gone = {r: left for r, left in self._left.items() if r in members}
        places = {r: (left.step, left.passes) for r, left in gone.items()}
        if len({(*places[r], left.stepped) for r, left in gone.items()}) == 1:
            left = next(iter(gone.values()))
            checks = ModelChecks(f"where all have left the loop of epoch {left.epoch}")
            checks.compare({r: left.checks for r, left in gone.items()})
        models = {
            (*places[r], *(bits for _, _, _, bits, *_ in left.checks))
            for r, left in gone.items()
        }
        if len(models) == 1 and not is_needed:
            return None
        last = max(places.values())
        return min(rank for rank, place in places.items() if place == last)
