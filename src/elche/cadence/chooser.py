"""Choice of policy and ranks for ``auto``, by predicted goodput."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from elche.cadence.convergence import UPDATES
from elche.cadence.goodput import (
    Fleet,
    MeasuredCluster,
    Prediction,
)
from elche.cadence.throughput import CostEstimate
from elche.errors import ConfigError

MARGIN = 0.025
"""Least relative difference of goodput that counts as clearly better."""
SAMPLE_COST_SAFETY = 1.5
"""Safety factor on the sample cost of windows: about what the intervals of the table
allow at two and four ranks. Steps of ``sync``, and of one device, cost none."""
PATIENCE = 2
"""Observations in a row that a change takes."""
SWITCH_HYSTERESIS = 1.1
"""Hysteresis: a switch needs 1.1 times the gain predicted at the last choice."""
SETTLING = 10
"""Observations that may correct what the others promised at that time."""
JITTER = 1.1 / 0.9
"""The most by which times that are wrong by 10 % correct it."""
BELOW_ONE_GAIN = 0.02
"""Gain for which a run leaves a choice that is slower than the fastest device, if it
can come back."""
OTHER_DEVICE_GAIN = 0.25
"""The same for another device alone: what a whole batch takes it was extrapolated."""
ROUNDING = 1e-9
NAMED_RANKS = 4
"""So many left out ranks a reason names; of more it gives the number."""
MAX_SIZES = 32
"""Up to so many ranks each number of the fastest is tried, beyond only jumps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What ``auto`` runs now.

    Attributes:
        policy: ``"sync"``, ``"cadence"`` or ``"async"``.
        anchor: batches of the slowest rank in a window, to start from.
        left_out: ranks that cost more than they bring, ascending.
        prediction: of this choice.
        alternatives: of the other policies on the ranks that they suit best.
        changed: whether this differs in policy or ranks from the choice before.
        reason: what was picked and why, in a sentence.
    """

    policy: str
    anchor: int
    left_out: tuple[int, ...]
    prediction: Prediction
    alternatives: tuple[Prediction, ...]
    changed: bool
    reason: str

    @property
    def is_alone(self) -> bool:
        """Whether one of several ranks trains alone."""
        return self.prediction.world_size == 1 and bool(self.left_out)

    @property
    def carried_out_by(self) -> str:
        """The policy that carries it out: alone, no rank waits for a reduction."""
        return "async" if self.is_alone else self.policy

    def is_carried_out_as(self, other: Choice) -> bool:
        """Whether nothing changes between them but perhaps the anchor."""
        return (self.carried_out_by, self.left_out) == (
            other.carried_out_by,
            other.left_out,
        )


@dataclass(frozen=True, slots=True)
class _Option:
    """A policy on the given ranks, from the fastest to the slowest."""

    prediction: Prediction
    ranks: tuple[int, ...]

    @property
    def goodput(self) -> float:
        return self.prediction.goodput

    @property
    def goodput_at_worst(self) -> float:
        """Goodput with windows at `SAMPLE_COST_SAFETY` times their sample cost."""
        known = self.prediction.sample_efficiency
        if self.policy == "sync":
            return self.goodput
        return self.goodput / (known + SAMPLE_COST_SAFETY * (1.0 - known))

    @property
    def policy(self) -> str:
        return self.prediction.policy

    def is_as(self, other: _Option) -> bool:
        is_alone = len(self.ranks) == 1
        is_same = is_alone or self.policy == other.policy
        return is_same and set(self.ranks) == set(other.ranks)


@final
class Chooser:
    """Picks the policy and the ranks with the highest predicted goodput, and stays.

    ``sync`` leaves the user's optimisation as it is, so it is picked unless another
    policy is clearly better. As many ranks take part as come within the same margin of
    the best number of them, the slowest left out first, and never so many that the
    fastest device alone would be faster.

    Measured times are smoothed as El Che's are: jitter is nearly ignored, a link that
    becomes ten times slower is believed at once. A choice then stays until, in
    `PATIENCE` observations in a row, another one is clearly better, and by a tenth
    better than it promised to be when the choice was made (as far as the next
    observations confirm or correct that): jitter of 10 % undoes no choice. A choice
    that is slower than the fastest device alone is left for a gain of 2 %; ``sync`` for
    that device alone, from where there is no way back to ``sync``, for the margin.

    Args:
        leaves_out: leave out ranks that cost more than they bring.
    """

    __slots__ = (
        "_age",
        "_current",
        "_doubt",
        "_fixed_s",
        "_leaves_out",
        "_most",
        "_policies",
        "_promised",
        "_ranks",
        "_rival",
        "_seconds",
        "_seen",
        "_sync_s",
    )

    def __init__(self, *, leaves_out: bool = True) -> None:
        self._leaves_out = leaves_out
        self._policies = tuple(UPDATES)
        self._current: _Option | None = None
        self._doubt = 0.0
        self._promised: dict[str, float] = {}
        self._most: dict[str, float] = {}
        self._rival = ""
        self._seen = self._age = 0
        self._restart(())

    def fix_update(self, update: str) -> None:
        """From the first commit on, only policies that average the same are left.

        Args:
            update: ``"gradients"`` or ``"parameters"``.

        Raises:
            ConfigError: the update is none of these, or another one is fixed.
        """
        left = tuple(policy for policy in UPDATES if UPDATES[policy] == update)
        if not left:
            raise ConfigError(
                f"the update must be 'gradients' or 'parameters', got {update!r}"
            )
        if not set(left).issubset(self._policies):
            raise ConfigError(
                f"the update is fixed to {UPDATES[self._policies[0]]!r}, it cannot "
                f"become {update!r} in the same run"
            )
        self._policies = left

    def observe(self, cluster: MeasuredCluster) -> Choice:
        """Takes in what was measured, and answers what to run.

        Args:
            cluster: the ranks of the run, also those that are left out now. With
                other ranks than before the choice is made anew.

        Returns:
            The choice; its anchor follows the measurements, its policy and ranks change
            only as the class says.
        """
        cluster = self._smoothed(cluster)
        self._doubt = cluster.doubt
        fleet = Fleet(cluster, drops=self._leaves_out)
        options = [self._sized(fleet, policy) for policy in self._policies]
        before = self._present(cluster, options)
        rival = None if before is None else self._rival_of(before, options)
        due = rival is not None and self._seen >= PATIENCE
        chosen = before or self._preferred(options)
        if rival is not None and due:
            chosen = rival
        changed = self._current is None or not chosen.is_as(self._current)
        if changed:
            self._promised = {o.policy: o.goodput / chosen.goodput for o in options}
            self._most = {p: JITTER * value for p, value in self._promised.items()}
            self._rival, self._seen, self._age = "", 0, 0
        self._current = chosen

        left_out = _left_out(cluster, fleet, chosen)
        reason = self._reason(chosen, options, fleet, left_out)
        if rival is not None and not due:
            reason += f"; {rival.policy} {rival.goodput:.2f} is clearly better, seen "
            reason += f"{self._seen} of {PATIENCE} times"
        elif before is not None and changed:
            reason += f"; until now {before.policy} on {_so_many(before.ranks)}, "
            reason += f"{before.goodput:.2f}"
        return Choice(
            policy=chosen.policy,
            anchor=chosen.prediction.first_anchor,
            left_out=left_out,
            prediction=chosen.prediction,
            alternatives=tuple(
                o.prediction for o in options if o.policy != chosen.policy
            ),
            changed=changed,
            reason=reason,
        )

    def _sized(self, fleet: Fleet, policy: str) -> _Option:
        """The policy on as many ranks as come close to the best number of them."""
        sizes = _sizes(fleet) if self._leaves_out else [len(fleet.ranks)]
        best = 0.0
        for size in sizes:
            if fleet.bound(size) <= best:
                break
            best = max(best, fleet.predict(policy, size).goodput)
        least = max(best / (1.0 + MARGIN), min(best, 1.0) * (1.0 - ROUNDING))
        size = next(s for s in sizes if fleet.predict(policy, s).goodput >= least)
        return _Option(fleet.predict(policy, size), fleet.ranks[:size])

    def _preferred(self, options: Sequence[_Option]) -> _Option:
        """The best one, or ``sync`` where nothing is clearly better."""
        best = max(options, key=lambda option: option.goodput)
        for option in options:
            if option.policy == "sync" and not self._clearly(best, option):
                return option
        return best

    def _clearly(self, option: _Option, other: _Option) -> bool:
        """Better by the margin, and than steps even at worst.

        Than one device by more than what its measured times may be wrong by.
        """
        if other.policy == "sync" and option.goodput_at_worst < other.goodput:
            return False
        margin = MARGIN if len(other.ranks) > 1 else max(MARGIN, self._doubt)
        return option.goodput >= (1.0 + margin) * other.goodput

    def _beats(self, option: _Option, present: _Option) -> bool:
        """Whether to leave the present choice for this option, if that lasts."""
        if option.is_as(present):
            return False
        if present.goodput < 1.0:
            for_good = option.policy == "sync" and len(option.ranks) == 1
            gain = MARGIN if for_good else BELOW_ONE_GAIN
            if len(option.ranks) == len(present.ranks) == 1:
                gain = OTHER_DEVICE_GAIN
            return option.goodput >= (1.0 + gain) * present.goodput
        least = max(1.0 + MARGIN, SWITCH_HYSTERESIS * self._promised[option.policy])
        return option.goodput >= least * present.goodput

    def _rival_of(self, present: _Option, options: Sequence[_Option]) -> _Option | None:
        """What should replace the present choice; counts how often in a row it did."""
        self._age += 1
        for option in options if self._age < SETTLING else ():
            promise = min(option.goodput / present.goodput, self._most[option.policy])
            self._promised[option.policy] = max(promise, self._promised[option.policy])
        better = [option for option in options if self._beats(option, present)]
        if not better:
            self._rival, self._seen = "", 0
            return None
        rival = self._preferred(better)
        self._seen = self._seen + 1 if rival.policy == self._rival else 1
        self._rival = rival.policy
        return rival

    def _present(
        self, cluster: MeasuredCluster, options: Sequence[_Option]
    ) -> _Option | None:
        """The current choice as it is now; None if there is none that may stay."""
        current = self._current
        if current is None or current.policy not in self._policies:
            return None
        for option in options:
            if option.is_as(current):
                return option
        fleet = Fleet(cluster, current.ranks, drops=self._leaves_out)
        size = len(current.ranks)
        return _Option(fleet.predict(current.policy, size), current.ranks)

    def _smoothed(self, cluster: MeasuredCluster) -> MeasuredCluster:
        if tuple(cluster.ranks) != self._ranks:
            self._restart(tuple(cluster.ranks))
        return replace(
            cluster,
            seconds_per_sample=_follow(self._seconds, cluster.seconds_per_sample),
            fixed_s=_follow(self._fixed_s, cluster.fixed_s),
            sync_s=_follow(self._sync_s, [cluster.sync_s])[0],
        )

    def _restart(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._seconds = [CostEstimate() for _ in ranks]
        self._fixed_s = [CostEstimate() for _ in ranks]
        self._sync_s = [CostEstimate()]
        self._current = None
        self._rival, self._seen = "", 0

    def _reason(
        self,
        chosen: _Option,
        options: Sequence[_Option],
        fleet: Fleet,
        left_out: Sequence[int],
    ) -> str:
        said = f"{chosen.policy} on {_so_many(chosen.ranks)}: {_figures(chosen)}"
        if len(chosen.ranks) == 1 < len(fleet.ranks):
            said = f"training on one device alone: {_figures(chosen)}"
        others = [o for o in options if o.policy != chosen.policy]
        for other in others:
            said += f"; {other.policy} {other.goodput:.2f}"
            if len(other.ranks) != len(chosen.ranks):
                said += f" on {_so_many(other.ranks)}"
        if not any(self._clearly(other, chosen) for other in others):
            better = [o.policy for o in others if o.goodput > chosen.goodput]
            said += ", not clearly better" if better else ""
        if left_out:
            everybody = len(fleet.ranks)
            most = max(fleet.predict(p, everybody).goodput for p in self._policies)
            named = ", ".join(map(str, left_out[:NAMED_RANKS]))
            if len(left_out) > NAMED_RANKS:
                named += f" and {len(left_out) - NAMED_RANKS} more"
            said += f"; left out: rank {named}"
            said += ", which would slow it" if most < chosen.goodput else ""
            said += f" (with all ranks predicted {most:.2f} at most)"
        return said


def best_together(fleet: Fleet) -> float:
    """The highest goodput of several ranks, under any policy."""
    sizes = [size for size in _sizes(fleet) if size > 1]
    return max(fleet.predict(p, size).goodput for p in UPDATES for size in sizes)


def _sizes(fleet: Fleet) -> list[int]:
    """Numbers of the fastest ranks to try, from all of them down to one.

    In a large fleet those at which the slowest becomes faster by the root of two: no
    more than twice the logarithm of the ratio of speeds.
    """
    everybody = len(fleet.ranks)
    if everybody <= MAX_SIZES:
        return list(range(everybody, 0, -1))
    sizes, slowest_s = [everybody], fleet.batch_s[-1]
    while sizes[-1] > 1:
        slowest_s = max(slowest_s / math.sqrt(2.0), fleet.batch_s[0])
        size = bisect_right(fleet.batch_s, slowest_s)
        if size < sizes[-1]:
            sizes.append(size)
        elif slowest_s == fleet.batch_s[0]:
            sizes.append(1)
    return sizes


def _follow(estimates: list[CostEstimate], measured: Sequence[float]) -> list[float]:
    """Smooths each measured time; 0 is none, and forgets what was before."""
    for place, value in enumerate(measured):
        if value > 0.0:
            estimates[place].observe(value)
        else:
            estimates[place] = CostEstimate()
    return [estimate.value for estimate in estimates]


def _left_out(
    cluster: MeasuredCluster, fleet: Fleet, chosen: _Option
) -> tuple[int, ...]:
    """Numbers of the ranks that an option leaves out, ascending."""
    places = set(fleet.ranks).difference(chosen.ranks)
    return tuple(sorted(cluster.ranks[place] for place in places))


def _so_many(ranks: Sequence[int]) -> str:
    return "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"


def _figures(option: _Option) -> str:
    prediction = option.prediction
    if prediction.world_size == 1:
        pace = "nothing to synchronise"
    elif prediction.policy == "sync":
        pace = f"a step of {prediction.window_s:.3g} s"
    else:
        batches = f"{prediction.anchor} batch{'es' * (prediction.anchor > 1)}"
        pace = f"windows of {prediction.window_s:.3g} s, {batches} of the slowest rank"
    return (
        f"predicted {prediction.goodput:.2f} times the fastest device alone (hardware "
        f"efficiency {prediction.hardware_efficiency:.2f}, sample efficiency "
        f"{prediction.sample_efficiency:.2f}, {pace})"
    )
