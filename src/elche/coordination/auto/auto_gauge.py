"""Measurements of ``auto``: batch times per rank, and the model's reduction time.

Under ``sync`` steps of different sizes give the fixed cost of a rank's step and the
cost per sample; from then on a factor follows the rank's speed. The reduction time is
probed once, and afterwards inferred: under ``sync`` from the part of it that is not
hidden by backward, under windows from the ranks' reports of its result. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from elche.cadence.convergence import REFERENCE_BATCHES
from elche.cadence.goodput import BACKWARD_SHARE, MeasuredCluster, expected_most
from elche.config import RunConfig
from elche.coordination.accounts.local_batches import local_cut
from elche.coordination.protocol.events import BatchesDone, StepsDone, WindowReduced

MOST_HIDDEN = 0.95
"""A reduction of which less shows cannot be distinguished from the rest of a step."""
SPREAD = 1.25
"""Steps whose sizes differ by this factor tell fixed seconds from those per sample."""
MAX_EXPLORING_COST = 3.0
"""How much longer than another step one may take in which half of the ranks rest."""
KEPT_REPORTS = 64
MAD_TO_SIGMA = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""
LEAST_S = 1e-9


@dataclass(slots=True)
class _Costs:
    """One rank: what its steps cost by size, and how that has changed since."""

    sample_s: float = 0.0
    fixed_s: float = 0.0
    factor: float = 1.0
    steps: list[tuple[int, float, int]] = field(default_factory=list)
    spent_s: float = 0.0
    expected_s: float = 0.0

    def step_s(self, samples: float) -> float:
        """Expected when the costs were learned."""
        return self.fixed_s + samples * self.sample_s

    def learn(self) -> None:
        """Medians of the small and of the large steps show both costs.

        Without steps of different sizes all of a step counts as that of its samples.
        """
        if not self.steps:
            return
        sizes = [samples for samples, _, _ in self.steps]
        middle = math.sqrt(min(sizes) * max(sizes))
        small = [step for step in self.steps if step[0] <= middle]
        large = [step for step in self.steps if step[0] > middle]
        samples, step_s = _typical(large or small)
        self.sample_s, self.fixed_s = step_s / samples, 0.0
        if large and max(sizes) >= SPREAD * min(sizes):
            fewer, less_s = _typical(small)
            slope_s = (step_s - less_s) / (samples - fewer)
            slope_s = min(max(slope_s, LEAST_S * step_s), self.sample_s)
            # Rounding must not leave less than nothing.
            self.sample_s, self.fixed_s = slope_s, max(0.0, step_s - samples * slope_s)
        self.factor = 1.0

    def deviations(self) -> list[float]:
        """Of single steps from what steps of their size take, relative to that."""
        return [
            abs(step_s / self.step_s(samples) - 1.0) * math.sqrt(steps)
            for samples, step_s, steps in self.steps
        ]

    def follow(self) -> None:
        """Takes in how much longer work has taken since than it was expected to."""
        if self.expected_s > 0.0 and self.spent_s > 0.0:
            self.factor = self.spent_s / self.expected_s
        self.spent_s = self.expected_s = 0.0


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
        self._ranks = [_Costs() for _ in range(world_size)]
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

    def reported(self, event: StepsDone) -> list[StepsDone]:
        """A rank has run a grant; the last one of them gets the reports of all."""
        reports = self._grants.setdefault(event.start, {})
        reports[event.rank] = event
        if len(reports) < len(self._ranks):
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
        for rank, report in enumerate(reports):
            samples, costs = report.samples // steps or self._few, self._ranks[rank]
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
        other.is_cold = True
        other.took_steps([replace(report, warm=True) for report in reports])
        other.learn(probe_s)
        return other

    def halves(self, ranks: Iterable[int], samples: int) -> list[tuple[int, ...]]:
        """Either half of the ranks, if the other can do the steps without it."""
        ordered = sorted(ranks, key=lambda rank: self.batch_s(rank, samples))
        speed = {rank: 1.0 / self.batch_s(rank, samples) for rank in ordered}
        found: list[tuple[int, ...]] = []
        for half in (ordered[1::2], ordered[0::2]):
            rest = sum(speed[rank] for rank in ordered if rank not in half)
            if rest * MAX_EXPLORING_COST >= sum(speed.values()):
                found.append(tuple(half))
        return found

    def learn(self, probe_s: float) -> None:
        """Learns the ranks' costs, and how much of a reduction hides under backward.

        Args:
            probe_s: what one reduction takes.
        """
        for costs in self._ranks:
            costs.learn()
            costs.spent_s = costs.expected_s = 0.0
        deviations = [d for costs in self._ranks for d in costs.deviations()]
        if deviations:
            self._jitter = MAD_TO_SIGMA * median(deviations)
        self.sync_s = probe_s
        if self._exposed_s:
            shown_s = median(self._exposed_s)
            self.sync_s = max(probe_s, shown_s, LEAST_S)
            self._hidden = min(1.0 - shown_s / self.sync_s, MOST_HIDDEN)
        self._exposed_s.clear()

    def finish_learning(self) -> None:
        """Costs per sample and step stay as they are; speeds are followed."""
        self._is_learned = True
        self.measurements = 0
        for costs in self._ranks:
            costs.steps.clear()

    def follow(self) -> None:
        """Takes in what was measured since the last time."""
        self.measurements = 0
        self.is_cold = False
        for costs in self._ranks:
            costs.follow()
        if self._syncs_s:
            self.sync_s = median(self._syncs_s)
        elif self._exposed_s:
            shown_s = median(self._exposed_s)
            hidden_s = shown_s * self._hidden / (1.0 - self._hidden)
            self.sync_s = shown_s + min(hidden_s, BACKWARD_SHARE * self._step_s)
        self._syncs_s.clear()
        self._exposed_s.clear()

    def cluster(self, batch_size: int) -> MeasuredCluster:
        """The ranks as they are now.

        Args:
            batch_size: samples of a global batch; windows would train on parts of it.
        """
        ranks = self._ranks
        return MeasuredCluster(
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
            optimizer=self._optimizer,
        )


def _typical(steps: Sequence[tuple[int, float, int]]) -> tuple[float, float]:
    """The median size, and the median time of a step."""
    samples = float(median(samples for samples, _, _ in steps))
    return samples, median(step_s for _, step_s, _ in steps)
