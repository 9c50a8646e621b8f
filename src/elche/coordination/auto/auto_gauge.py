"""Measurements of ``auto``: batch times per rank, and the model's reduction time.

Under ``sync`` steps of different sizes give the fixed cost of a rank's step and the
cost per sample; from then on a factor follows the rank's speed. The reduction time is
probed once, and afterwards inferred: under ``sync`` from the part of it that is not
hidden by backward, under windows from the ranks' reports of its result. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from statistics import median

from elche.cadence.convergence import REFERENCE_BATCHES
from elche.cadence.goodput import BACKWARD_SHARE, MeasuredCluster, expected_most
from elche.config import RunConfig
from elche.coordination.accounts.local_batches import local_cut
from elche.coordination.auto.rank_costs import (
    LEAST_S,
    RankCosts,
    common_fixed_samples,
)
from elche.coordination.protocol.events import BatchesDone, StepsDone, WindowReduced

MOST_HIDDEN = 0.95
"""A reduction of which less shows cannot be distinguished from the rest of a step."""
LEAST_JITTER = 0.05
"""Of steps, as long as few have been measured."""
DOUBT = 2.0
"""So many standard errors of the ranks' times may be wrong in what is predicted."""
ONE_SIZE_DOUBT = 0.25
"""The same where steps of one size were run, or none was warm."""
KEPT_REPORTS = 64
FIXED_PRIOR = 1.0 / 3.0
"""Part of a whole batch's time that counts as fixed where no rank has run two sizes."""
MAD_TO_SIGMA = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""


class Gauge:
    """Measures the ranks of one run.

    Args:
        config: the run's settings.
        world_size: ranks.
        min_share_samples: samples that a rank without a share runs its loop on.
        optimizer: kind of the model's.

    Attributes:
        cut: of the batches that windows would train on.
        sync_s: what a reduction takes.
        measurements: grants of steps, or windows, since the last :meth:`follow`.
        is_cold: knows the ranks by steps that were not warm, and by nothing since.
    """

    def __init__(
        self,
        config: RunConfig,
        world_size: int,
        min_share_samples: int,
        optimizer: str = "adam",
    ) -> None:
        self._config = config
        self._few = max(1, min_share_samples)
        self._optimizer = optimizer
        self.cut = local_cut(config.windows, world_size, self._few)
        self._ranks = {rank: RankCosts() for rank in range(world_size)}
        self._is_redone = False
        self._exposed_s: list[float] = []
        self._syncs_s: list[float] = []
        self._hidden = 0.0
        self._jitter = 0.0
        self._step_s = 0.0
        self._grants: dict[int, dict[int, StepsDone]] = {}
        self._windows: dict[int, dict[int, WindowReduced]] = {}
        self._run_batches = float(REFERENCE_BATCHES)
        self._is_learned = False
        self.sync_s = 0.0
        self.measurements = 0
        self.is_cold = False

    def begin_epoch(self, run_batches: float) -> None:
        """An epoch begins, in a run expected to have so many batches."""
        self._run_batches = run_batches
        self._grants.clear()

    def remove(self, rank: int) -> None:
        """A rank is gone; what is known of the others stays.

        Of a reduction that it breaks off nothing is measured.
        """
        self._ranks.pop(rank, None)
        self._forget_open()

    def add(self, rank: int) -> None:
        """A rank joins: as the others usually are, until it is measured.

        While costs are learned steps are measured anew, with it.
        """
        known = [*self._ranks.values()]
        self._ranks[rank] = RankCosts(
            sample_s=median(costs.factor * costs.sample_s for costs in known),
            fixed_s=median(costs.factor * costs.fixed_s for costs in known),
        )
        self._forget_open()
        self._syncs_s.clear()
        self._exposed_s.clear()
        self.measurements = 0
        if not self._is_learned:
            for costs in known:
                costs.steps.clear()

    def _forget_open(self) -> None:
        """Other ranks: of what they were to report nothing is measured."""
        self.cut = local_cut(self._config.windows, len(self._ranks), self._few)
        self._grants.clear()
        self._windows.clear()
        self._is_redone = True

    def reported(self, event: StepsDone, left_out: int = 0) -> list[StepsDone]:
        """A rank has run a grant; the last one of them gets the reports of all.

        Args:
            event: a rank's report.
            left_out: so many ranks take no part in steps.
        """
        reports = self._grants.setdefault(event.start, {})
        reports[event.rank] = event
        if len(reports) < len(self._ranks) - left_out:
            return []
        del self._grants[event.start]
        return [reports[rank] for rank in sorted(reports)]

    def took_steps(self, reports: Sequence[StepsDone]) -> bool:
        """All ranks have run a grant of ``sync``; one that was not warm is no measure.

        Args:
            reports: one of each rank, in order.

        Returns:
            Whether it is one.
        """
        if not all(report.warm for report in reports):
            return False
        steps = reports[0].stop - reports[0].start
        for report in reports:
            costs = self._ranks[report.rank]
            samples = report.samples // steps or self._few
            costs.equal = sum(each.samples for each in reports) / steps / len(reports)
            if not self._is_learned:
                costs.steps.append((samples, report.busy_s / steps, steps))
            costs.spent_s += report.busy_s
            costs.expected_s += steps * costs.step_s(samples)
        self._step_s = max(report.busy_s for report in reports) / steps
        shown_s = min(report.sync_wait_s for report in reports) / steps
        # Over several steps no rank is always the last: each waits for the others.
        spread = self._jitter * (1.0 - 1.0 / math.sqrt(steps))
        shown_s -= spread * expected_most(len(reports)) * self._step_s
        shown_s = max(0.0, shown_s)
        self._exposed_s = [*self._exposed_s, shown_s][-KEPT_REPORTS:]
        self.measurements += 1
        return True

    def trained(self, event: BatchesDone) -> None:
        """A rank has trained on batches of a window."""
        if event.timed:
            samples = event.samples / (event.stop - event.start)
            costs = self._ranks[event.rank]
            costs.spent_s += event.timed_s
            costs.expected_s += event.timed * costs.step_s(samples)

    def reduced(self, event: WindowReduced, samples: int) -> bool:
        """A rank holds a window's result; True when all do: the reduction is measured.

        From the end of its window on, a rank trained some batches and waited for the
        rest. That of the rank for which this was least is the reduction, up to a part
        of a batch: the others may have waited for that rank.

        Args:
            event: a rank's report.
            samples: of a batch of these windows.
        """
        reports = self._windows.setdefault(event.window, {})
        reports[event.rank] = event
        if len(reports) < len(self._ranks):
            return False
        del self._windows[event.window]
        was_redone, self._is_redone = self._is_redone, False
        if was_redone:
            return False
        taken_s = []
        for rank, report in reports.items():
            lag_batches = max(0.0, report.adopted_at - 0.5)
            taken_s.append(lag_batches * self.batch_s(rank, samples) + report.sync_s)
        self._syncs_s.append(min(taken_s))
        self.measurements += 1
        return True

    def batch_s(self, rank: int, samples: int) -> float:
        """Seconds of a batch on a rank, as it is now."""
        costs = self._ranks[rank]
        return costs.factor * costs.step_s(samples)

    def speeds(
        self, ranks: Iterable[int], left_out: Collection[int], samples: int
    ) -> tuple[float, ...]:
        """Batches per second; who is left out must not be what windows are paced by."""
        batch_s = {rank: self.batch_s(rank, samples) for rank in ranks}
        slowest_s = max(s for rank, s in batch_s.items() if rank not in left_out)
        return tuple(
            1.0 / (slowest_s if rank in left_out else cost_s)
            for rank, cost_s in batch_s.items()
        )

    def quick_gauge(self, reports: Sequence[StepsDone], probe_s: float) -> Gauge:
        """Another gauge that knows the ranks by steps that were not warm.

        They took longer than steps do. Beside them a reduction looks cheaper than it
        is, so where it seems too dear it is.

        Args:
            reports: one of each rank, in order.
            probe_s: what one reduction takes.
        """
        other = Gauge(self._config, len(reports), self._few, self._optimizer)
        other.begin_epoch(self._run_batches)
        other.cut, other._ranks = self.cut, {rank: RankCosts() for rank in self._ranks}
        other.is_cold = True
        other.took_steps([replace(report, warm=True) for report in reports])
        other.learn(probe_s)
        return other

    def to_spare(self, samples: int, steps: int) -> tuple[int, ...]:
        """Ranks that get the least part of the next step, after so many warm ones.

        All but the fastest in every other step.
        """
        if not steps % 2:
            return ()
        slowest = sorted(self._ranks, key=lambda rank: -self.batch_s(rank, samples))
        return tuple(slowest[:-1])

    def step_s(self, samples: int, spared: Collection[int]) -> float:
        """About what a step takes in which these ranks get the least part."""
        ranks = self._ranks
        rates = [1.0 / self.batch_s(r, samples) for r in ranks if r not in spared]
        return max(1.0 / sum(rates), *(self.batch_s(r, self._few) for r in ranks))

    def learn(self, probe_s: float) -> None:
        """Learns the ranks' costs, and how much of a reduction hides under backward.

        Args:
            probe_s: what one reduction takes.
        """
        for costs in self._ranks.values():
            costs.learn()
            costs.spent_s = costs.expected_s = 0.0
        self._assume_fixed()
        deviations = [d for costs in self._ranks.values() for d in costs.deviations()]
        if deviations:
            self._jitter = MAD_TO_SIGMA * median(deviations)
        self.sync_s = probe_s
        if self._exposed_s:
            shown_s = median(self._exposed_s)
            self.sync_s = max(probe_s, shown_s, LEAST_S)
            self._hidden = min(1.0 - shown_s / self.sync_s, MOST_HIDDEN)
        self._exposed_s.clear()

    def _assume_fixed(self) -> None:
        """What is fixed of steps of ranks that have run one size: as of the others.

        Where nobody has, much of each step: else one device, which runs more samples,
        would look slow beside all of them.
        """
        fixed_samples = common_fixed_samples([*self._ranks.values()])
        for costs in self._ranks.values():
            if fixed_samples is not None:
                costs.assume(fixed_samples)
            elif costs.steps:
                whole = costs.equal * len(self._ranks)
                costs.assume(FIXED_PRIOR / (1.0 - FIXED_PRIOR) * whole)

    def finish_learning(self) -> None:
        """Costs per sample and step stay as they are; speeds are followed."""
        self._is_learned = True
        self.measurements = 0
        for costs in self._ranks.values():
            costs.steps.clear()

    def follow(self) -> None:
        """Takes in what was measured since the last time."""
        self.measurements = 0
        self.is_cold = False
        for costs in self._ranks.values():
            costs.follow()
        if self._syncs_s:
            self.sync_s = median(self._syncs_s)
        elif self._exposed_s:
            shown_s = median(self._exposed_s)
            hidden_s = shown_s * self._hidden / (1.0 - self._hidden)
            self.sync_s = shown_s + min(hidden_s, BACKWARD_SHARE * self._step_s)
        self._syncs_s.clear()
        self._exposed_s.clear()

    @property
    def has_sizes(self) -> bool:
        """Whether steps of sizes that differ tell what is fixed of them."""
        return any(costs.has_spread for costs in self._ranks.values())

    @property
    def doubt(self) -> float:
        """Relative error that a first choice, by few steps, may have."""
        if self._is_learned or not self.measurements:
            return 0.0
        if not self.has_sizes:
            return ONE_SIZE_DOUBT
        jitter = max(LEAST_JITTER, self._jitter)
        # The fastest device's whole batch, by which all gains are, was half of them.
        return DOUBT * jitter * math.sqrt(2.0 / self.measurements)

    def cluster(self, batch_size: int) -> MeasuredCluster:
        """The ranks as they are now.

        Args:
            batch_size: samples of a global batch; windows would train on parts of it.
        """
        ranks = self._ranks.values()
        return MeasuredCluster(
            ranks=tuple(self._ranks),
            seconds_per_sample=[
                max(LEAST_S, costs.factor * costs.sample_s) for costs in ranks
            ],
            fixed_s=[costs.factor * costs.fixed_s for costs in ranks],
            batch_size=self.cut.largest_of(batch_size),
            sync_batch_size=batch_size,
            sync_s=self.sync_s,
            hidden=self._hidden,
            jitter=self._jitter,
            overhead_target=self._config.windows.overhead_target,
            max_anchor=max(1, self._config.windows.max_anchor),
            min_share_samples=self._few,
            run_batches=self._run_batches,
            doubt=self.doubt,
            optimizer=self._optimizer,
        )
