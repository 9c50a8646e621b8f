"""Metrics of epochs and windows: sums over the ranks' reports.

`MetricsBook` accepts reports in any order and at any world size, with one addition per
number, and closes them into plain comparable values. Users' scalars arrive as weighted
sums; their means do not depend on the order in which ranks report. Pure.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, TypeVar

from elche.coordination.protocol.messages import Scalars, Work
from elche.errors import ProtocolError

WINDOWS_KEPT = EPOCHS_KEPT = 1000
"""Most metrics kept for a reader; the oldest are dropped."""
MOST_LEFT_OUT = 2**53
"""Upper bound of the count of excluded values, so that it fits a 64-bit integer."""

Kind = TypeVar("Kind", bound="Metrics")
_TIMES = "busy_s", "data_wait_s", "transfer_s", "sync_wait_s"
_COUNTED = ("samples", "discarded_samples", "late_batches", *_TIMES)
"""Fields of `RankReport` that are summed per rank."""


class WeightedMean:
    """Weighted mean of values, with a count of the values excluded from it.

    It has no rounding error, whatever the order of its parts.
    """

    __slots__ = ("_excluded", "_weight", "_weighted_sum")

    def __init__(self) -> None:
        self._weighted_sum = self._weight = Fraction()
        self._excluded = 0

    def add(self, weighted_sum: float, weight: float) -> None:
        """Adds values by their weighted sum and their weight.

        If either is not finite, or the weight is negative, nothing is added: ``weight``
        values, at least one, count as excluded. A weight of zero adds nothing.
        """
        if not (math.isfinite(weighted_sum) and 0.0 <= weight < math.inf):
            self.exclude(int(weight) if 1.0 <= weight < MOST_LEFT_OUT else 1)
        elif weight > 0.0:
            self._weighted_sum += Fraction(weighted_sum)
            self._weight += Fraction(weight)

    def exclude(self, count: int) -> None:
        """Counts values excluded from the mean."""
        self._excluded = min(self._excluded + count, MOST_LEFT_OUT)

    def merge(self, other: WeightedMean) -> None:
        """Adds another mean's values."""
        self._weighted_sum += other._weighted_sum
        self._weight += other._weight
        self.exclude(other._excluded)

    @property
    def parts(self) -> tuple[float, float]:
        """Weighted sum and weight, each rounded once; NaN where one has overflowed."""
        return _rounded(self._weighted_sum), _rounded(self._weight)

    @property
    def value(self) -> float | None:
        """The mean; None without values, or where it is beyond the range of floats."""
        weighted_sum, weight = self.parts
        mean = weighted_sum / weight if weight else math.nan
        return mean if math.isfinite(mean) else None

    @property
    def excluded(self) -> int:
        """Number of excluded values, plus one if the mean itself overflows."""
        beyond = self.value is None and self._weight != 0
        return min(self._excluded + beyond, MOST_LEFT_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport(Work):
    """One rank's work in part of a window; reports of one window are added up.

    Negative ``samples`` correct earlier ones that were discarded.

    Attributes:
        discarded_samples: samples trained on but in no model; see `Metrics`.
        sync_wait_s: time in synchronisations: waiting for other ranks and reducing.
        late_batches: batches of the next window run before the average was adopted.
        divergence: distance from the consensus over its norm, None if not measured.
        parameter_norm: L2 norm of the consensus, None if not measured.
        scalars: (name, weighted sum, weight) of the user's logged scalars. If the
            weighted sum is not finite, the entry counts as ``weight`` excluded values.
    """

    discarded_samples: int = 0
    sync_wait_s: float = 0.0
    late_batches: int = 0
    divergence: float | None = None
    parameter_norm: float | None = None
    scalars: Scalars = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Work of the ranks over some time; tuples have one number per rank.

    In large runs only the first rank receives these; the others receive `totals`.

    Attributes:
        epoch: epoch number, from 0.
        synchronisations: number of synchronisations that ended in this time.
        duration_s: wall time.
        rank_samples: samples of each rank whose contribution is in the model.
        discarded_samples: samples of each rank whose contribution is in no model: it
            was not finite, or its rank was lost before the reduction. In the latter
            case they were trained on again, and also count in ``rank_samples``.
        busy_s: delivered time (data wait, transfer and compute).
        data_wait_s: part of ``busy_s`` spent waiting for data.
        transfer_s: part of ``busy_s`` spent moving batches to the device.
        sync_wait_s: time in synchronisations.
        late_batches: overlapped: batches of the next window that each rank ran before
            it adopted the average, summed over synchronisations.
        divergence: distance from the consensus over its norm, the largest of several
            synchronisations; infinite if a rank's parameters were not finite; empty
            unless every rank has reported it.
        parameter_norm: L2 norm of the consensus, None if not measured.
        means: (name, weighted mean) of the user's logged scalars, sorted by name,
            discarded samples included. With a GradScaler, ``grad_scaler_skips`` is the
            fraction of optimizer steps it skipped; their samples count as done.
        left_out: (name, count) of logged values that were not finite and are in no
            mean.
    """

    epoch: int
    synchronisations: int
    duration_s: float
    rank_samples: tuple[int, ...]
    discarded_samples: tuple[int, ...]
    busy_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    sync_wait_s: tuple[float, ...]
    late_batches: tuple[int, ...] = ()
    divergence: tuple[float, ...] = ()
    parameter_norm: float | None = None
    means: tuple[tuple[str, float], ...] = ()
    left_out: tuple[tuple[str, int], ...] = ()

    @property
    def samples(self) -> int:
        """Samples of all ranks whose contribution is in the model."""
        return sum(self.rank_samples)

    @property
    def samples_per_s(self) -> float:
        """Throughput (samples/s) of the whole run by wall time; 0 if no time passed."""
        return self.samples / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def rank_samples_per_s(self) -> tuple[float, ...]:
        """Throughput (samples/s) of each rank outside of synchronisations.

        Discarded samples count, since they took time as well.
        """
        work = zip(self.rank_samples, self.discarded_samples, self.busy_s, strict=True)
        return tuple(
            (samples + discarded) / busy_s if busy_s > 0 else 0.0
            for samples, discarded, busy_s in work
        )

    @property
    def efficiency(self) -> float:
        """`samples_per_s` over the sum of `rank_samples_per_s`; 0 if nothing was done.

        Waiting for other ranks and reducing lower it below 1. It ignores that a device
        is slower on a share of a batch than on a whole one, and excluded devices.
        Meaningless for `totals`, whose tuples hold one number for all ranks.
        """
        most = math.fsum(self.rank_samples_per_s)
        return self.samples_per_s / most if most > 0 else 0.0

    @property
    def shares(self) -> tuple[float, ...]:
        """Each rank's fraction of the samples; zeros if there are none."""
        total = self.samples or 1
        return tuple(samples / total for samples in self.rank_samples)

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Delivered time without data wait and transfer."""
        parts = zip(self.busy_s, self.data_wait_s, self.transfer_s, strict=True)
        return tuple(max(0.0, busy - data - transfer) for busy, data, transfer in parts)

    def totals(self: Kind) -> Kind:
        """Returns a copy with one number for all ranks together, not one per rank.

        Numbers are summed; divergence is the maximum. `samples` and `samples_per_s`
        stay as they are, `rank_samples_per_s` becomes the mean rank's.
        """
        numbers = {_field_of(name): _total_of(name) for name in _COUNTED}
        totals: dict[str, Any] = {
            name: (total(getattr(self, name)),) for name, total in numbers.items()
        }
        most = (max(self.divergence),) if self.divergence else ()
        return replace(self, divergence=most, **totals)

    @property
    def scalars(self) -> dict[str, float]:
        """Weighted mean of each logged scalar, by name."""
        return dict(self.means)

    @property
    def non_finite(self) -> dict[str, int]:
        """Number of values of each scalar that were not finite, by name."""
        return dict(self.left_out)

    def as_fields(self) -> dict[str, Any]:
        """Returns the fields by name, without derived values."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def to_json(self) -> str:
        """Returns the fields as JSON for a message; `from_json` reads it back."""
        return json.dumps(self.as_fields())

    @classmethod
    def from_json(cls: type[Kind], text: str) -> Kind:
        """Reads what `to_json` wrote.

        Raises:
            ProtocolError: the text is not such JSON.
        """
        try:
            return cls(**{k: _tuples(value) for k, value in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"expected {cls.__name__} as JSON, got {text[:80]!r}: {error}"
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; an infinite divergence or norm is None."""
        plain: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.as_fields().items()
            if name not in ("means", "left_out")
        }
        plain |= {
            "samples": self.samples,
            "samples_per_s": self.samples_per_s,
            "rank_samples_per_s": list(self.rank_samples_per_s),
            "efficiency": self.efficiency,
            "shares": list(self.shares),
            "compute_s": list(self.compute_s),
            "scalars": self.scalars,
            "non_finite": self.non_finite,
            "divergence": [_finite_or_none(each) for each in self.divergence],
        }
        if self.parameter_norm is not None:
            plain["parameter_norm"] = _finite_or_none(self.parameter_norm)
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMetrics(Metrics):
    """Metrics of a window; see `Metrics` for the other attributes.

    Under ``sync``, where every step is a synchronisation, it covers the steps that the
    ranks reported together.

    Attributes:
        window: window number; under ``sync`` the number of the last step in the epoch.
    """

    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics(Metrics):
    """Metrics of an epoch; see `Metrics` for the attributes."""


class MetricsBook:
    """Sums the ranks' reports per window and over one epoch.

    Windows may overlap: a rank may report for the next window already.
    """

    def __init__(self, world_size: int, epoch: int, now_s: float) -> None:
        self._world_size = world_size
        self._epoch = epoch
        self._began_s = self._closed_s = now_s
        self._open: dict[int, _Account] = {}
        self._total = self._whole = _Account(world_size)

    @property
    def samples(self) -> int:
        """Samples of the epoch so far, without discarded ones."""
        accounts = (self._total, *self._open.values())
        return round(sum(sum(account.counted["samples"]) for account in accounts))

    def add(self, window: int, report: RankReport) -> None:
        """Adds a rank's report; the cost is proportional to its number of scalars.

        A report for a window that is closed counts in the next one.
        """
        if report.rank >= self._world_size:
            self._world_size = report.rank + 1
            for account in (self._total, *self._open.values()):
                account.grow(self._world_size)
        if window not in self._open:
            self._open[window] = _Account(self._world_size)
        self._open[window].add(report)

    def close_window(
        self, window: int, now_s: float, synchronisations: int = 1
    ) -> WindowMetrics:
        """Closes a window; its duration starts at the end of the last one.

        Args:
            window: window number; earlier windows that are open are merged into it.
            now_s: current time.
            synchronisations: number of synchronisations that it covers.
        """
        first, *others = sorted(n for n in self._open if n <= window) or [window]
        account = self._open.pop(first, None) or _Account(self._world_size)
        for number in others:
            account.merge(self._open.pop(number))
        account.synchronisations = synchronisations
        self._total.merge(account)
        before_s, self._closed_s = self._closed_s, now_s
        return WindowMetrics(
            window=window,
            epoch=self._epoch,
            duration_s=max(0.0, now_s - before_s),
            **account.as_fields(),
        )

    def end_epoch(
        self, now_s: float, before: MetricsBook | None = None
    ) -> EpochMetrics:
        """Closes the epoch; reports after its last window count in it.

        ``before`` is the book of the epoch's earlier parts; it is merged into this one.
        """
        for number in sorted(self._open):
            self._total.merge(self._open.pop(number))
        if before is not None:
            self._whole, self._began_s = before._whole, before._began_s
            self._whole.grow(self._world_size)
            self._whole.merge(self._total)
        return EpochMetrics(
            epoch=self._epoch,
            duration_s=max(0.0, now_s - self._began_s),
            **self._whole.as_fields(),
        )


class _Account:
    """Sums of the reports of one window, or of an epoch."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.counted = {name: _zeros(name, world_size) for name in _COUNTED}
        self.divergence: dict[int, float] = {}
        self.norm: tuple[int, float] | None = None
        self.means: defaultdict[str, WeightedMean] = defaultdict(WeightedMean)
        self.synchronisations = 0

    def add(self, report: RankReport) -> None:
        """Adds one report."""
        rank = report.rank
        for name, values in self.counted.items():
            values[rank] += getattr(report, name)
        if report.divergence is not None:
            self._diverged(rank, report.divergence)
        norm = report.parameter_norm
        if norm is not None and (self.norm is None or rank <= self.norm[0]):
            self.norm = (rank, _no_nan(norm))
        for name, weighted_sum, weight in report.scalars:
            self.means[name].add(weighted_sum, weight)

    def merge(self, later: _Account) -> None:
        """Adds a later account, which may have fewer ranks."""
        for name, values in self.counted.items():
            for rank, value in enumerate(later.counted[name]):
                values[rank] += value
        for rank, divergence in later.divergence.items():
            self._diverged(rank, divergence)
        self.norm = later.norm or self.norm
        for name, mean in later.means.items():
            self.means[name].merge(mean)
        self.synchronisations += later.synchronisations

    def grow(self, world_size: int) -> None:
        """Extends the sums for ranks that have joined."""
        for name, values in self.counted.items():
            values += _zeros(name, world_size - len(values))
        self.world_size = max(self.world_size, world_size)

    def as_fields(self) -> dict[str, Any]:
        """Returns the fields of `Metrics`, except epoch, window and duration."""
        names = sorted(self.means)
        values = [(name, self.means[name].value) for name in names]
        counts = [(name, self.means[name].excluded) for name in names]
        has_all = len(self.divergence) == self.world_size
        divergence = sorted(self.divergence.items()) if has_all else ()
        counted = {_field_of(name): tuple(n) for name, n in self.counted.items()}
        return counted | {
            "synchronisations": self.synchronisations,
            "divergence": tuple(value for _, value in divergence),
            "parameter_norm": None if self.norm is None else self.norm[1],
            "means": tuple((name, mean) for name, mean in values if mean is not None),
            "left_out": tuple((name, count) for name, count in counts if count),
        }

    def _diverged(self, rank: int, divergence: float) -> None:
        self.divergence[rank] = max(
            _no_nan(divergence), self.divergence.get(rank, -math.inf)
        )


def _field_of(name: str) -> str:
    """Returns the field of `Metrics` that sums this field of `RankReport`."""
    return "rank_samples" if name == "samples" else name


def _total_of(name: str) -> Callable[[Iterable[float]], float]:
    return math.fsum if name in _TIMES else sum


def _zeros(name: str, world_size: int) -> list[float]:
    return [0.0 if name in _TIMES else 0] * world_size


def _no_nan(value: float) -> float:
    """Returns the value, or infinity for NaN, so that values can be compared."""
    return math.inf if math.isnan(value) else value


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _tuples(value: Any) -> Any:
    """Converts JSON lists back to tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _rounded(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.nan
