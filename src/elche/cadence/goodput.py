"""Predicted goodput of each policy on a cluster, from measured times.

*Hardware efficiency* is the whole cluster's samples per second over the sum of what
its devices deliver alone. *Sample efficiency* (``elche.cadence.convergence``) is the
samples that one device needs to a given loss over those that the policy needs. Their
product times the summed speed, relative to the fastest device alone, is the *goodput*:
1.2 reaches the loss in 1 / 1.2 of the time. ``elche.cadence.chooser`` decides by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import NormalDist
from typing import final

from elche.cadence.convergence import REFERENCE_BATCHES, sample_efficiency
from elche.cadence.overlapped import (
    BatchTimes,
    anchor_for,
    best_anchor,
    overlapped_window,
)
from elche.cadence.split import split_for_makespan
from elche.cadence.window import ALIGNED_RANKS, aligned_anchor, lost_share

MAX_FIXED_SAMPLES = 1e9
"""Upper bound of a step's fixed time, in samples, when a batch is split."""

BACKWARD_SHARE = 2.0 / 3.0
"""Fraction of a step (its backward) that can hide a gradient reduction."""
BOUNDARY_WAIT_BATCHES = 0.25
"""Loss at the end of a blocking window of many ranks, in batches of the slowest."""
ANYWHERE = 0.29
"""Standard deviation (batches) of a boundary at a random place within a batch."""
LAST_CLOSER_BATCHES = 0.25
"""Delay of the last rank's end of an overlapped window, in batches of the slowest."""
ADOPTION_BATCHES = 0.5
"""Delay (own batches) until the fastest rank's next batch, where it adopts."""
FREE_WAIT = 0.01
"""Fraction of a window that ranks may wait at its end without lengthening it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCluster:
    """Measurements of a cluster, and the settings that its pace depends on.

    Attributes:
        seconds_per_sample: delivered time of each rank: data, transfer and compute.
        batch_size: samples of a local step of windows.
        sync_s: time (s) of one blocking reduction of the model.
        fixed_s: fixed time (s) of each rank per step; empty for none.
        hidden: fraction of ``sync_s`` that ``sync`` hides under backward, 0 to 1; never
            longer than backward.
        overhead_target: El Che's target; clamped to 0.01 to 0.50, as in El Che.
        max_anchor: El Che's upper limit.
        jitter: coefficient of variation of a step's time.
        copy_batches: cost of a snapshot and an adoption in ``async``, in a rank's own
            batches per window.
        min_share_samples: least samples of a rank in a step of ``sync``; a rank without
            a share runs its loop on that many, which do not count.
        sync_batch_size: samples of a global batch, the step of ``sync`` and of one
            device alone; None if equal to ``batch_size``.
        run_batches: number of global batches in the whole run.
        ranks: rank numbers in the order of the times; empty for 0, 1, ...
        doubt: possible relative error of gains predicted from these times.
        optimizer: its kind, see :func:`elche.cadence.convergence.optimizer_kind`.
    """

    seconds_per_sample: Sequence[float]
    batch_size: int
    sync_s: float
    fixed_s: Sequence[float] = ()
    hidden: float = 0.7
    overhead_target: float = 0.03
    max_anchor: int = 200
    jitter: float = 0.0
    copy_batches: float = 0.02
    min_share_samples: int = 1
    sync_batch_size: int | None = None
    run_batches: float = REFERENCE_BATCHES
    ranks: Sequence[int] = ()
    doubt: float = 0.0
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        ranks = len(self.seconds_per_sample)
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(ranks)))
        object.__setattr__(self, "fixed_s", tuple(self.fixed_s) or (0.0,) * ranks)
        target = min(max(float(self.overhead_target), 0.01), 0.50)
        object.__setattr__(self, "overhead_target", target)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.seconds_per_sample)

    @property
    def global_batch_size(self) -> int:
        """Samples of one step, under ``sync`` or on a single device."""
        return self.sync_batch_size or self.batch_size

    def batch_s(self, rank: int) -> float:
        """Returns the time (s) of a local step of ``batch_size`` samples on a rank."""
        return self.fixed_s[rank] + self.batch_size * self.seconds_per_sample[rank]

    def least_step_s(self, rank: int) -> float:
        """Returns the time (s) of the smallest step of ``sync`` on a rank."""
        samples = min(self.min_share_samples, self.global_batch_size)
        return self.fixed_s[rank] + samples * self.seconds_per_sample[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted throughput of a policy on a cluster.

    Attributes:
        policy: name of the policy.
        ranks: places of the ranks that take part, fastest first.
        anchor: batches of the slowest of these ranks in a window.
        first_anchor: initial anchor; overlapped windows get longer once their cost has
            been measured.
        window_s: time (s) from one synchronisation to the next.
        lag_batches: batches of the fastest rank until an average arrives.
        hardware_efficiency: 0 to 1, relative to what each device delivers alone on
            global batches, so fixed times of smaller local batches lower it.
        sample_efficiency: 0 to 1.
        goodput: product of both and the summed speed, relative to the cluster's
            fastest device alone.
    """

    policy: str
    ranks: tuple[int, ...]
    anchor: int
    window_s: float
    lag_batches: float
    hardware_efficiency: float
    sample_efficiency: float
    goodput: float
    first_anchor: int

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""
        return len(self.ranks)


@final
class Fleet:
    """Ranks of a cluster, fastest first, with predictions for the first few of them.

    The other ranks are excluded: they train nothing, but take part in every reduction,
    and under ``sync`` in every step, unless it drops them. A rank that trains alone
    takes global batches, and has nothing to wait for.

    Args:
        cluster: the measurements.
        ranks: ranks that may take part, each once; None for all.
        drops: ``sync`` continues without the other ranks, unless rank 0 is one.

    Attributes:
        ranks: the ranks, fastest first.
        batch_s: time (s) of a local step of each rank, in that order.
    """

    def __init__(
        self,
        cluster: MeasuredCluster,
        ranks: Sequence[int] | None = None,
        *,
        drops: bool = False,
    ) -> None:
        everybody = range(cluster.world_size)
        members = everybody if ranks is None else ranks
        times = [cluster.batch_s(rank) for rank in everybody]
        self.ranks = tuple(sorted(members, key=times.__getitem__))
        self._cluster = cluster
        self._drops = drops
        self.batch_s = [times[rank] for rank in self.ranks]
        self._speeds = list(accumulate(cluster.batch_size / s for s in self.batch_s))
        self._rates = list(
            accumulate(1.0 / cluster.seconds_per_sample[rank] for rank in self.ranks)
        )
        whole = cluster.global_batch_size
        costs = zip(cluster.fixed_s, cluster.seconds_per_sample, strict=True)
        alone = [whole / (fixed_s + whole * cost) for fixed_s, cost in costs]
        self._alone = list(accumulate(map(alone.__getitem__, self.ranks)))
        self._fastest = max(alone)
        self._batches = whole / cluster.batch_size
        others = set(everybody).difference(self.ranks)
        idle_s = [cluster.least_step_s(rank) for rank in reversed(self.ranks)]
        first_s = max((cluster.least_step_s(rank) for rank in others), default=0.0)
        self._idle_s = list(accumulate(idle_s, max, initial=first_s))[::-1]
        self._predicted: dict[tuple[str, int], Prediction] = {}

    def predict(self, policy: str, size: int) -> Prediction:
        """Predicts ``policy`` on the ``size`` fastest ranks."""
        if (policy, size) not in self._predicted:
            self._predicted[policy, size] = self._newly(policy, size)
        return self._predicted[policy, size]

    def _newly(self, policy: str, size: int) -> Prediction:
        if size == 1:
            alone_s = self._cluster.global_batch_size / self._alone[0]
            return self._prediction(policy, 1, 1, alone_s, self._batches, 0.0)
        if policy == "sync":
            return self._sync(size)
        return self._cadence(size) if policy == "cadence" else self._async(size)

    def bound(self, size: int) -> float:
        """Returns an upper bound of the goodput on the ``size`` fastest ranks."""
        return self._rates[size - 1] / self._fastest

    def _sync(self, size: int) -> Prediction:
        """Predicts a step's time: the slowest share, plus the exposed reduction."""
        cluster = self._cluster
        is_free = self._drops and 0 in self.ranks[:size]
        step_s = max(self._sync_step_s(size), 0.0 if is_free else self._idle_s[size])
        step_s *= 1.0 + cluster.jitter * expected_most(size)
        hidden_s = min(cluster.hidden * cluster.sync_s, BACKWARD_SHARE * step_s)
        window_s = step_s + cluster.sync_s - hidden_s
        return self._prediction("sync", size, 1, window_s, self._batches, 0.0)

    def _cadence(self, size: int) -> Prediction:
        """Predicts El Che's smallest anchor whose overhead meets the target."""
        cluster, slow_s = self._cluster, self.batch_s[size - 1]
        target, most = cluster.overhead_target, cluster.max_anchor
        asked = max(1, math.ceil(cluster.sync_s / (target * slow_s) - 1e-9))
        while True:
            anchor, wait_s = self._blocking(size, min(asked, most))
            work_s = anchor * slow_s
            overhead = cluster.sync_s / work_s + max(0.0, wait_s / work_s - FREE_WAIT)
            if overhead <= target * (1.0 + 1e-9) or asked >= most:
                break
            asked = max(asked + 1, math.ceil(asked * overhead / target - 1e-9))
        window_s = work_s + wait_s + cluster.sync_s
        batches = work_s * self._speeds[size - 1] / cluster.batch_size
        return self._prediction("cadence", size, anchor, window_s, batches, 0.0)

    def _blocking(self, size: int, anchor: int) -> tuple[int, float]:
        """Returns the anchor that aligns batches best, and the wait (s) at its end."""
        batch_s, slow_s = self.batch_s[:size], self.batch_s[size - 1]
        if size > ALIGNED_RANKS:
            return anchor, BOUNDARY_WAIT_BATCHES * slow_s
        anchor = aligned_anchor(anchor, batch_s, self._cluster.max_anchor)
        jitter = self._cluster.jitter  # times are known no better than that
        lost = max(0.0, lost_share(anchor, batch_s) - jitter)
        wait_s = anchor * slow_s * lost / (1.0 - lost)
        spread_s = [
            min(jitter * math.sqrt(anchor * slow_s / s), ANYWHERE) * s for s in batch_s
        ]
        if jitter > 0.0:
            most_s = max(spread_s)
            alike = 1.0 + sum((s / most_s) ** 2 for s in spread_s)
            wait_s += most_s * expected_most(alike)
        return anchor, wait_s

    def _async(self, size: int) -> Prediction:
        """Predicts windows as long as the reduction needs, or as pays (``Pacing``)."""
        cluster, slow_s, fast_s = self._cluster, self.batch_s[size - 1], self.batch_s[0]
        per_s = self._speeds[size - 1] / cluster.batch_size
        times = BatchTimes(size, fast_s, slow_s, per_s)
        held_s = cluster.copy_batches * size / per_s
        late_s = cluster.sync_s + LAST_CLOSER_BATCHES * slow_s
        late_s += ADOPTION_BATCHES * fast_s
        least, most = anchor_for(times, cluster.sync_s), cluster.max_anchor
        anchor = best_anchor(times, held_s, late_s, most, least=least)
        window = overlapped_window(times, anchor, held_s, late_s)
        found = self._prediction(
            "async", size, anchor, window.window_s, window.batches, window.lag_batches
        )
        return replace(found, first_anchor=min(least, most))

    def _prediction(
        self,
        policy: str,
        size: int,
        anchor: int,
        window_s: float,
        batches: float,
        lag: float,
    ) -> Prediction:
        alone = self._alone[size - 1]
        hardware = batches * self._cluster.batch_size / window_s / alone
        cluster = self._cluster
        part = cluster.batch_size / cluster.global_batch_size
        sample = sample_efficiency(
            policy,
            size,
            batches,
            lag,
            run_batches=cluster.run_batches,
            global_batch=size * part,
            optimizer=cluster.optimizer,
        )
        return Prediction(
            policy=policy,
            ranks=self.ranks[:size],
            anchor=anchor,
            window_s=window_s,
            lag_batches=lag,
            hardware_efficiency=hardware,
            sample_efficiency=sample,
            goodput=hardware * sample * alone / self._fastest,
            first_anchor=anchor,
        )

    def _sync_step_s(self, size: int) -> float:
        """Returns the time (s) of a global batch, split as by ``Balancer``."""
        cluster = self._cluster
        cost, fixed_s = cluster.seconds_per_sample, cluster.fixed_s
        total = cluster.global_batch_size
        least = min(cluster.min_share_samples, total)
        by_start = sorted(self.ranks[:size], key=cluster.least_step_s)
        served = by_start[: total // least]
        parts = split_for_makespan(
            total,
            [cost[r] for r in served],
            [min(fixed_s[r] / cost[r], MAX_FIXED_SAMPLES) for r in served],
            least,
        )
        ends_s = [
            fixed_s[r] + part * cost[r] for r, part in zip(served, parts, strict=True)
        ]
        return max(*ends_s, cluster.least_step_s(by_start[-1]))


def predict(
    policy: str, cluster: MeasuredCluster, ranks: Sequence[int] | None = None
) -> Prediction:
    """Predicts a policy on a cluster, or on some of its ranks.

    A step of ``sync`` takes as long as its longest share, plus the reduction that is
    not hidden under backward. ``cadence`` loses the reduction, and waits because whole
    batches do not end together. It uses El Che's smallest anchor within the overhead
    target. ``async`` loses copies, and the reduction only if it outlasts a window.

    Args:
        policy: ``"sync"``, ``"cadence"`` or ``"async"``.
        cluster: the measurements.
        ranks: ranks that take part; None for all.
    """
    fleet = Fleet(cluster, ranks)
    return fleet.predict(policy, len(fleet.ranks))


def expected_most(ranks: float) -> float:
    """Returns the expected maximum of ``ranks`` draws, in sigmas (G. Blom, 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
