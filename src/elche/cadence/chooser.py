"""Choice of policy and ranks for ``auto``, by predicted goodput."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from elche.cadence.convergence import UPDATES
from elche.cadence.goodput import Fleet, MeasuredCluster, Prediction

MARGIN = 0.025
"""Least relative difference of goodput that counts as clearly better."""
SAMPLE_COST_SAFETY = 1.5
"""Safety factor on the sample cost of windows, from the table's confidence intervals at
two and four ranks. Steps of ``sync``, and of one device, have no sample cost."""
PATIENCE = 2
"""Consecutive choices that must agree before a change inside an epoch."""
SWITCH_GAIN = 0.1
"""Least gain to replace a choice that is faster than the fastest device alone."""
BELOW_ONE_GAIN = 0.02
"""Least gain to replace a choice slower than the fastest device, if the run can return
to it."""
OTHER_DEVICE_GAIN = 0.25
"""Least gain to switch to another device alone, whose time is extrapolated."""
DOUBT_IN_COMMON = 0.5
"""Part of the doubt that counts between choices of several ranks. Both predictions use
the same ranks' times, so they differ by the doubt of a reduction's time only.
"""
ROUNDING = 1e-9
NAMED_RANKS = 4
"""Most excluded ranks that a reason names; beyond, it gives their number."""
MAX_SIZES = 32
"""Most ranks for which every number of fastest ranks is tried; beyond, only some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Current choice of ``auto``.

    Attributes:
        policy: ``"sync"``, ``"cadence"`` or ``"async"``.
        anchor: initial number of batches of the slowest rank in a window.
        excluded: ranks that cost more time than they save, ascending.
        prediction: prediction of this choice.
        reason: a sentence with the choice and its reason.
    """

    policy: str
    anchor: int
    excluded: tuple[int, ...]
    prediction: Prediction
    reason: str

    @property
    def is_alone(self) -> bool:
        """True if one of several ranks trains alone."""
        return self.prediction.world_size == 1 and bool(self.excluded)

    @property
    def carried_out_by(self) -> str:
        """Policy that executes it: a rank alone uses ``async``, without waits."""
        return "async" if self.is_alone else self.policy

    def is_carried_out_as(self, other: Choice) -> bool:
        """True if both choices execute alike, except perhaps for the anchor."""
        return (self.carried_out_by, self.excluded) == (
            other.carried_out_by,
            other.excluded,
        )


@final
class Chooser:
    """Picks and keeps the policy and the ranks with the highest predicted goodput.

    ``sync`` does not change the user's optimisation, so it is picked unless another
    policy is clearly better. It keeps the most ranks whose goodput is within that
    margin of the best, and excludes the slowest first. It never takes so many that the
    fastest device alone would be faster.

    A choice is kept until another one is better by a tenth, so that jitter of measured
    times does not change it. A choice slower than the fastest device alone is replaced
    for a gain of 2 %. To replace ``sync`` by that device alone, the gain must reach the
    margin, since there is no way back to ``sync`` within the epoch.

    Args:
        leaves_out: exclude ranks that cost more time than they save.
    """

    def __init__(self, *, leaves_out: bool = True) -> None:
        self._excludes = leaves_out
        self._policies = tuple(UPDATES)
        self._members: tuple[int, ...] = ()
        self._current: Prediction | None = None
        self._rival: tuple[str, frozenset[int]] | None = None
        self._seen = 0

    def fix_update(self, update: str) -> None:
        """Restricts later choices to policies that average ``update``.

        Args:
            update: ``"gradients"`` or ``"parameters"``.
        """
        self._policies = tuple(p for p in UPDATES if UPDATES[p] == update)

    def choose(self, cluster: MeasuredCluster, patience: int = 1) -> Choice:
        """Predicts goodput, and returns the choice.

        Args:
            cluster: the ranks of the run, including excluded ones. With other ranks
                than before, the choice is made again.
            patience: number of consecutive choices that must agree on a change.

        Returns:
            The choice. Its anchor follows the measurements; its policy and ranks change
            only as the class describes.
        """
        if tuple(cluster.ranks) != self._members:
            self._members, self._current, self._seen = tuple(cluster.ranks), None, 0
        fleet = Fleet(cluster, drops=self._excludes)
        options = [self._sized(fleet, policy) for policy in self._policies]
        before = self._present(cluster, options)
        chosen = before or self._preferred(options, cluster.doubt)
        better = [o for o in options if before is not None and self._beats(o, before)]
        if better:
            rival = self._preferred(better, cluster.doubt)
            key = rival.policy, frozenset(rival.ranks)
            self._seen = self._seen + 1 if key == self._rival else 1
            self._rival = key
            if self._seen >= patience:
                chosen = rival
        if not better or chosen is not before:
            self._rival, self._seen = None, 0
        self._current = chosen
        places = set(fleet.ranks).difference(chosen.ranks)
        excluded = tuple(sorted(cluster.ranks[place] for place in places))
        reason = self._reason(chosen, options, fleet, excluded, cluster.doubt)
        if before is not None and chosen is not before:
            reason += f"; until now {before.policy} on {_so_many(before.ranks)}, "
            reason += f"{before.goodput:.2f}"
        return Choice(
            policy=chosen.policy,
            anchor=chosen.first_anchor,
            excluded=excluded,
            prediction=chosen,
            reason=reason,
        )

    def _sized(self, fleet: Fleet, policy: str) -> Prediction:
        """Returns the policy on the most ranks within the margin of the best number."""
        sizes = _sizes(fleet) if self._excludes else [len(fleet.ranks)]
        best = 0.0
        for size in sizes:
            if fleet.bound(size) <= best:
                break
            best = max(best, fleet.predict(policy, size).goodput)
        least = max(best / (1.0 + MARGIN), min(best, 1.0) * (1.0 - ROUNDING))
        size = next(s for s in sizes if fleet.predict(policy, s).goodput >= least)
        return fleet.predict(policy, size)

    def _preferred(self, options: Sequence[Prediction], doubt: float) -> Prediction:
        """Returns the best option, or ``sync`` unless another is clearly better."""
        best = max(options, key=lambda option: option.goodput)
        for option in options:
            if option.policy == "sync" and not _is_clear(best, option, doubt):
                return option
        return best

    def _beats(self, option: Prediction, present: Prediction) -> bool:
        """True if the option should replace the present choice."""
        if _is_same(option, present):
            return False
        gain = SWITCH_GAIN
        if present.goodput < 1.0:
            for_good = option.policy == "sync" and len(option.ranks) == 1
            gain = MARGIN if for_good else BELOW_ONE_GAIN
            if len(option.ranks) == len(present.ranks) == 1:
                gain = OTHER_DEVICE_GAIN
        return option.goodput >= (1.0 + gain) * present.goodput

    def _present(
        self, cluster: MeasuredCluster, options: Sequence[Prediction]
    ) -> Prediction | None:
        """Returns the current choice, predicted again; None if it cannot be kept."""
        current = self._current
        if current is None or current.policy not in self._policies:
            return None
        for option in options:
            if _is_same(option, current):
                return option
        fleet = Fleet(cluster, current.ranks, drops=self._excludes)
        return fleet.predict(current.policy, len(current.ranks))

    def _reason(
        self,
        chosen: Prediction,
        options: Sequence[Prediction],
        fleet: Fleet,
        excluded: Sequence[int],
        doubt: float,
    ) -> str:
        text = f"{chosen.policy} on {_so_many(chosen.ranks)}: {_figures(chosen)}"
        if len(chosen.ranks) == 1 < len(fleet.ranks):
            text = f"training on one device alone: {_figures(chosen)}"
        others = [o for o in options if o.policy != chosen.policy]
        for other in others:
            text += f"; {other.policy} {other.goodput:.2f}"
            if len(other.ranks) != len(chosen.ranks):
                text += f" on {_so_many(other.ranks)}"
        if not any(_is_clear(other, chosen, doubt) for other in others):
            better = [o.policy for o in others if o.goodput > chosen.goodput]
            text += ", not clearly better" if better else ""
        if excluded:
            everybody = len(fleet.ranks)
            most = max(fleet.predict(p, everybody).goodput for p in self._policies)
            named = ", ".join(map(str, excluded[:NAMED_RANKS]))
            if len(excluded) > NAMED_RANKS:
                named += f" and {len(excluded) - NAMED_RANKS} more"
            text += f"; excluded: rank {named}"
            text += ", which would slow the run" if most < chosen.goodput else ""
            text += f" (predicted with all ranks: at most {most:.2f})"
        return text


def best_together(fleet: Fleet) -> float:
    """Returns the highest goodput of several ranks under any policy."""
    sizes = [size for size in _sizes(fleet) if size > 1]
    return max(fleet.predict(p, size).goodput for p in UPDATES for size in sizes)


def _sizes(fleet: Fleet) -> list[int]:
    """Returns numbers of fastest ranks to try, from all of them down to one.

    A large fleet is sampled: each size's slowest rank is at least sqrt(2) times as fast
    as the previous size's. That gives at most 2 log2(fastest / slowest) sizes.
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


def _is_same(option: Prediction, other: Prediction) -> bool:
    """True for the same ranks and policy; a rank alone may have any policy."""
    is_same = len(option.ranks) == 1 or option.policy == other.policy
    return is_same and set(option.ranks) == set(other.ranks)


def _is_clear(option: Prediction, other: Prediction, doubt: float) -> bool:
    """True if ``option`` is better by the margin, and beats ``sync`` even at worst.

    The margin is at least the doubt of the measured times, or a part of it where both
    predictions use the same ones.
    """
    if other.policy == "sync" and option.policy != "sync":
        known = option.sample_efficiency
        at_worst = option.goodput / (known + SAMPLE_COST_SAFETY * (1.0 - known))
        if at_worst < other.goodput:
            return False
    if len(other.ranks) > 1:
        doubt *= DOUBT_IN_COMMON
    return option.goodput >= (1.0 + max(MARGIN, doubt)) * other.goodput


def _so_many(ranks: Sequence[int]) -> str:
    return "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"


def _figures(option: Prediction) -> str:
    if option.world_size == 1:
        pace = "nothing to synchronise"
    elif option.policy == "sync":
        pace = f"a step of {option.window_s:.3g} s"
    else:
        batches = f"{option.anchor} batch{'es' * (option.anchor > 1)}"
        pace = f"windows of {option.window_s:.3g} s, {batches} of the slowest rank"
    return (
        f"predicted {option.goodput:.2f} times the fastest device alone (hardware "
        f"efficiency {option.hardware_efficiency:.2f}, sample efficiency "
        f"{option.sample_efficiency:.2f}, {pace})"
    )
