"""Measurements under ``sync``: times of the ranks and of a reduction. Pure.

The ranks' times are those that balance shares. The reduction was probed when the group
was formed; later it is inferred from its visible part in steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from elche.cadence.goodput import BACKWARD_SHARE, MeasuredCluster, expected_most
from elche.cadence.rank_time import RankTime, RankTimes
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.local_batches import local_cut
from elche.coordination.agreement import Settings
from elche.coordination.policy import Member, Outcome, PolicyChooser
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import Instruction
from elche.coordination.sync.sync_policy import SyncPolicy

MOST_HIDDEN = 0.95
"""Hidden fraction of a reduction above which it cannot be measured."""
LEAST_JITTER = 0.05
"""Lower bound of a step's relative deviation, for doubts."""
DOUBT = 2.0
"""Error of a prediction, in standard errors of the ranks' times."""
ONE_SIZE_DOUBT = 0.25
"""Assumed relative doubt where only one step size, or no warm step, was measured."""
FIXED_PRIOR = 1.0 / 3.0
"""Fraction of a whole batch's time assumed fixed if no rank has run two sizes."""
MOST_COMPARED = 8
"""Most ranks whose fixed parts are compared."""
KEPT_STEPS = 64
"""Number of latest steps whose visible reductions count."""
LEAST_S = 1e-9
USUAL_EPOCHS = 10
"""Assumed number of epochs when ``epochs=`` is not given."""


@final
class Measures:
    """Measured times of the ranks and of a reduction.

    Args:
        settings: the settings that the ranks agreed on.
        times: the ranks' times, recorded by the policies.

    Attributes:
        count: grants of warm steps measured since the last choice.
        probe_s: time of a reduction as probed.
        sync_s: time of a reduction as of now.
    """

    def __init__(self, settings: Settings, times: RankTimes) -> None:
        self._config = settings.config
        self._optimizer = settings.optimizer_kind
        self.few = max(1, settings.min_share_samples)
        self._times = times
        self._cold: dict[int, RankTime] = {}
        self._shown_s: list[float] = []
        self._hidden = 0.0
        self._is_learned = False
        self.probe_s = self.sync_s = 0.0
        self.count = 0

    def settle(self) -> None:
        """Fixes the hidden part of a reduction, since a choice was made."""
        self._is_learned = True
        self._shown_s.clear()
        self.count = 0

    def take(self, reports: Sequence[StepsDone], steps: int) -> None:
        """Records the reports of all active ranks for one grant.

        Cold steps give the ranks' times only until the first warm step. Compared with
        them a reduction looks cheap; one that still looks expensive is.
        """
        if not all(report.warm for report in reports):
            for report in reports if not self.count else ():
                self._cold[report.rank] = RankTime()
                samples = report.samples // steps or self.few
                self._cold[report.rank].observe(samples, max(report.busy_s, LEAST_S))
        else:
            self._cold.clear()
            self.count += 1
        step_s = max(report.busy_s for report in reports) / steps
        shown_s = min(report.sync_wait_s for report in reports) / steps
        # Over several steps no rank is always the last: each waits for another.
        spread = self._jitter * (1.0 - 1.0 / math.sqrt(steps))
        shown_s -= spread * expected_most(len(reports)) * step_s
        if self.count:
            self._shown_s = [*self._shown_s, max(0.0, shown_s)][-KEPT_STEPS:]
        self._infer(max(0.0, shown_s), step_s)

    def _infer(self, shown_s: float, step_s: float) -> None:
        """Updates the time of a reduction, and its fraction hidden under backward."""
        shown_s = median(self._shown_s or [shown_s])
        if not self._is_learned:
            self.sync_s = max(self.probe_s, shown_s, LEAST_S)
            self._hidden = min(1.0 - shown_s / self.sync_s, MOST_HIDDEN)
        else:
            hidden_s = shown_s * self._hidden / (1.0 - self._hidden)
            self.sync_s = shown_s + min(hidden_s, BACKWARD_SHARE * step_s)

    @property
    def _jitter(self) -> float:
        spreads = [t.spread for t in self._times.values() if t.is_measured]
        return median(spreads) if spreads else 0.0

    @property
    def has_sizes(self) -> bool:
        """True if the measured step sizes differ enough to estimate the fixed cost."""
        return any(time.has_sizes for time in self._times.values())

    @property
    def doubt(self) -> float:
        """Possible relative error of a first choice after few steps."""
        if self._is_learned:
            return 0.0
        if not self.has_sizes:
            return ONE_SIZE_DOUBT
        jitter = max(LEAST_JITTER, self._jitter)
        # Half of them measured the fastest device's whole batch, the base of gains.
        return DOUBT * jitter * math.sqrt(2.0 / max(1, self.count))

    def cluster(
        self, ranks: Sequence[int], batch_size: int, run_batches: float
    ) -> MeasuredCluster:
        """Returns the ranks as measured, in a run of ``run_batches`` global batches."""
        lines = self._lines(ranks, batch_size)
        cut = local_cut(self._config.windows, len(ranks), self.few)
        return MeasuredCluster(
            ranks=tuple(ranks),
            seconds_per_sample=[max(LEAST_S, cost) for _, cost in lines],
            fixed_s=[fixed_s for fixed_s, _ in lines],
            batch_size=cut.largest_of(batch_size),
            sync_batch_size=batch_size,
            sync_s=self.sync_s,
            hidden=self._hidden,
            jitter=self._jitter,
            overhead_target=self._config.windows.overhead_target,
            max_anchor=max(1, self._config.windows.max_anchor),
            min_share_samples=self.few,
            run_batches=run_batches,
            doubt=self.doubt,
            optimizer=self._optimizer,
        )

    def _lines(
        self, ranks: Sequence[int], batch_size: int
    ) -> list[tuple[float, float]]:
        """Returns fixed seconds and seconds per sample of each rank.

        A rank with one step size is assumed to have the other ranks' fixed part. If no
        rank has run two sizes, a large fixed part is assumed: otherwise one device
        alone, which runs more samples, would look slow. An unmeasured rank counts as
        the median rank.
        """
        times: Mapping[int, RankTime] = self._cold or self._times
        measured = {r: times[r] for r in ranks if r in times and times[r].is_measured}
        seen = {rank: time for rank, time in measured.items() if time.has_sizes}
        compared = [*seen.values()][:MOST_COMPARED]
        found = {rank: time.line(compared) for rank, time in seen.items()}
        fixed = FIXED_PRIOR / (1.0 - FIXED_PRIOR) * batch_size
        if found:
            fixed = median(fixed_s / cost for fixed_s, cost in found.values())
        for rank, time in measured.items():
            if rank not in seen:
                cost = time.of(time.last_samples) / (fixed + time.last_samples)
                found[rank] = fixed * cost, cost
        usual = (
            median(fixed_s for fixed_s, _ in found.values()) if found else 0.0,
            median(cost for _, cost in found.values()) if found else LEAST_S,
        )
        return [found.get(rank, usual) for rank in ranks]


@final
@dataclass(slots=True)
class RunLength:
    """Length (batches) of the run if later epochs are as long as this one."""

    given_epochs: int | None
    begun_epochs: int = 0
    epoch_batches: int = 0

    def begin_epoch(self, epoch: int, sizes: BatchSizes) -> None:
        """Records an epoch's length; the rest of a cut epoch changes nothing."""
        if epoch + 1 != self.begun_epochs:
            self.begun_epochs, self.epoch_batches = epoch + 1, sizes.num_batches

    @property
    def epochs(self) -> int:
        """Number of epochs as given; an estimate without it, or beyond it."""
        if self.given_epochs is not None and self.given_epochs >= self.begun_epochs:
            return self.given_epochs
        return max(USUAL_EPOCHS, 2 * self.begun_epochs)

    @property
    def batches(self) -> int:
        """Number of global batches in all epochs."""
        return self.epochs * self.epoch_batches

    def __str__(self) -> str:
        text = f"in a run of {self.batches} batches"
        if self.given_epochs is None:
            text += f", assuming {self.epochs} epochs (set epochs= to change it)"
        return text


class MeasuredSteps(PolicyChooser):
    """Owner of a ``sync`` policy whose steps are measured."""

    def __init__(self, members: Sequence[Member], settings: Settings) -> None:
        self._times = RankTimes()
        self._sync = SyncPolicy(members, settings, self._times)
        super().__init__(self._sync)
        self._settings = settings
        self._members = {member.rank: member for member in members}
        self._measures = Measures(settings, self._times)
        self._length = RunLength(settings.epochs)
        self._batch_size = 0
        self._sync.watch = self._watch

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Starts an epoch, or the rest of one, under the policy in force."""
        self._length.begin_epoch(epoch, sizes)
        self._batch_size = max(sizes.runs, key=lambda run: run[1])[0]
        return super().begin_epoch(epoch, sizes, now_s)

    def _cluster(self) -> MeasuredCluster:
        """Returns the members as measured so far."""
        batches = float(max(1, self._length.batches))
        return self._measures.cluster([*self._members], self._batch_size, batches)

    @abstractmethod
    def _watch(self, reports: Sequence[StepsDone], steps: int) -> list[Instruction]:
        """Handles the reports of ``steps`` steps before more are granted."""
