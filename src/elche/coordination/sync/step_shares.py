"""Shares of a global batch under ``sync``, by delivered speed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from elche.cadence.balancer import Balancer
from elche.cadence.rank_time import RankTimes
from elche.cadence.split import clip_split
from elche.cadence.throughput import SpeedHints
from elche.coordination.agreement import Settings
from elche.coordination.protocol.events import StepsDone


@final
class StepShares:
    """The members' shares of a global batch.

    Args:
        settings: the settings that the ranks agreed on.
        ranks: the members.
        times: measured times of the ranks, read and updated; None: not measured yet.

    Attributes:
        is_fixed: whether shares ignore measured times.
        balancer: sizes the shares; its ranks are the members in order.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: Iterable[int],
        times: RankTimes | None = None,
    ) -> None:
        config = settings.config
        self._times = RankTimes() if times is None else times
        self._places = _places(ranks)
        self._caps = {rank: cap for rank, cap in enumerate(config.caps) if cap}
        self._accumulates = settings.micro_batches
        self.is_fixed = config.debug.deterministic or config.shares == "fixed"
        self._keeps_columns = config.shares == "fixed"
        self._first: tuple[int, ...] = ()
        self._min_share_samples = settings.min_share_samples
        self.balancer = self._balanced(config.speed_hints)
        self._steps = 0

    def of(self, samples: int, world_size: int) -> tuple[int, ...]:
        """Returns each rank's samples in a step of ``samples``, 0 for lost ranks."""
        sizes = self.balancer.sizes(samples)
        if self._keeps_columns:
            first = self._first = self._first or sizes
            if samples < sum(first):
                sizes = clip_split(first, samples, self._min_share_samples) or sizes
        return self._spread(sizes, world_size)

    def trial(
        self, samples: int, world_size: int, granted: int
    ) -> tuple[int, ...] | None:
        """Returns other shares for an occasional test step; see :meth:`Balancer.trial`.

        Args:
            samples: samples of the step.
            world_size: highest rank plus one.
            granted: number of steps that are granted and not measured yet.
        """
        sizes = self.balancer.trial(samples, self._steps)
        if sizes is None:
            return None
        self._steps = -granted  # the next trial comes after this one is measured
        return self._spread(sizes, world_size)

    def _spread(self, sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
        """Converts the members' shares to a tuple indexed by rank."""
        shares = [0] * world_size
        for rank, size in zip(self._places, sizes, strict=True):
            shares[rank] = size
        return tuple(shares)

    def measured(self, reports: Sequence[StepsDone], steps: int) -> None:
        """Records the active members' times of ``steps`` steps.

        A rank alone reduces nothing: its times would not fit those of a group.
        """
        if self.is_fixed or len(reports) == 1 < len(self._places):
            return
        samples, busy_s = [0] * len(self._places), [0.0] * len(self._places)
        for report in reports:
            place = self._places.get(report.rank)
            if place is not None:
                samples[place] = report.samples // steps
                busy_s[place] = report.busy_s / steps
        self.balancer.report(samples, busy_s)
        self._steps += steps

    def limit(self, rank: int, samples: int) -> None:
        """Limits a rank's later shares to the samples that its device can hold.

        Args:
            rank: the limited rank.
            samples: most samples that fit at once; 0: no limit found.
        """
        if not 0 < samples < self._caps.get(rank, samples + 1):
            return
        self._caps[rank] = samples
        if not self.is_fixed:
            self.balancer.limit(self._places[rank], samples)

    def assign_least(self, ranks: Iterable[int]) -> None:
        """Assigns these ranks the least share of later steps."""
        self.balancer.assign_least([self._places[rank] for rank in ranks])

    def exclude(self, ranks: Iterable[int]) -> None:
        """Assigns these ranks no share from now on, and all others one."""
        self.balancer.exclude([self._places[rank] for rank in ranks])

    def step_s(
        self, samples: int, excluded: Iterable[int], reduce_s: float = 0.0
    ) -> float:
        """Predicts a step's time (s) without ranks; see :meth:`Balancer.step_s`."""
        places = [self._places[rank] for rank in excluded]
        return self.balancer.step_s(samples, places, reduce_s)

    def given_s(self, samples: int, share: int = 0) -> dict[int, float]:
        """Predicts the time (s) of each rank's share; see :meth:`Balancer.given_s`."""
        times_s = self.balancer.given_s(samples, share)
        return dict(zip(self._places, times_s, strict=True))

    def forget(self, ranks: Iterable[int]) -> None:
        """Discards these ranks' measured times."""
        for rank in ranks:
            self.balancer.forget(self._places[rank])

    def follow(self, ranks: Iterable[int]) -> None:
        """Adopts new members; a new rank is assumed of average speed."""
        costs = self.balancer.costs_s()
        speeds = {
            rank: 1.0 / cost for rank, cost in zip(self._places, costs, strict=True)
        }
        usual = sum(speeds.values()) / len(speeds)
        used = dict(zip(self._places, self.balancer.used_sizes, strict=True))
        self._places = _places(ranks)
        self._first = ()
        self.balancer = self._balanced(
            [speeds.get(rank, usual) for rank in self._places]
        )
        self.balancer.reuse([used.get(rank, ()) for rank in self._places])

    def _balanced(self, hints: SpeedHints) -> Balancer:
        return Balancer(
            len(self._places),
            min_share_samples=self._min_share_samples,
            speed_hints=hints,
            max_samples=[self._caps.get(rank) for rank in self._places],
            accumulates=self._accumulates,
            times=[self._times[rank] for rank in self._places],
        )


def _places(ranks: Iterable[int]) -> dict[int, int]:
    """Returns each member's index among the balancer's ranks."""
    return {rank: place for place, rank in enumerate(sorted(ranks))}
