"""Metrics of epochs and windows: sums over the ranks' reports.

`MetricsBook` takes reports in any order and at any world size, one addition per number,
and closes them into plain comparable values. Scalars that users log arrive as weighted
sums; their means do not depend on the order in which ranks report. Pure.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from elche.coordination.accounts.exact_mean import WeightedMean
from elche.coordination.protocol.messages import Scalars
from elche.errors import ProtocolError

WINDOWS_KEPT = EPOCHS_KEPT = 1000
"""Most metrics kept for a reader; the oldest are dropped."""

Kind = TypeVar("Kind", bound="Metrics")
_TIMES = "busy_s", "data_wait_s", "transfer_s", "sync_wait_s"
_COUNTED = ("samples", "discarded_samples", "late_batches", *_TIMES)
"""Fields of `RankReport` that are added up by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Part of what one rank did in a window; parts are added up.

    Attributes:
        rank: who.
        samples: trained on; negative where earlier ones turned out to be discarded.
        discarded_samples: trained on for nothing; see `Metrics`.
        busy_s: delivered time: waiting for data, transfer and compute.
        data_wait_s: of it, waiting for data.
        transfer_s: of it, moving batches to the device.
        sync_wait_s: in synchronisations: waiting for other ranks and reducing.
        late_batches: run in the next window before it held the average.
        divergence: distance from the consensus over its norm, None if not measured.
        parameter_norm: L2 norm of the consensus, None if not measured.
        scalars: (name, weighted sum, weight) of what the user logged. An entry whose
            weighted sum is not finite stands for as many values that were left out as
            its weight says.
    """

    rank: int
    samples: int = 0
    discarded_samples: int = 0
    busy_s: float = 0.0
    data_wait_s: float = 0.0
    transfer_s: float = 0.0
    sync_wait_s: float = 0.0
    late_batches: int = 0
    divergence: float | None = None
    parameter_norm: float | None = None
    scalars: Scalars = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Work of the ranks over some time; tuples of numbers have one per rank.

    In a run of many ranks only the first one is told of each; the others are told
    `totals`.

    Attributes:
        epoch: counted from 0.
        synchronisations: how many ended in it.
        duration_s: wall time.
        rank_samples: samples of each rank whose contribution is in the model.
        discarded_samples: samples that each rank trained on beside them, and whose
            contribution is in no model: it was not finite, or its rank was lost before
            it was reduced. These, but not those, were trained on again, and count
            there as well.
        busy_s: delivered time (data wait, transfer and compute).
        data_wait_s: of it, waiting for data.
        transfer_s: of it, moving batches to the device.
        sync_wait_s: in synchronisations.
        late_batches: overlapped, those that each rank ran in the next window before it
            held the average; their sum if there were several synchronisations.
        divergence: distance from the consensus over its norm, the largest if there were
            several; infinite where a rank's parameters were not finite; empty unless
            every rank has said it.
        parameter_norm: L2 norm of the consensus, None if it was not measured.
        means: (name, weighted mean) of what users logged, in the order of names, on
            samples that were discarded too. Where a GradScaler steps the optimizer,
            ``grad_scaler_skips`` is the part of its steps that it skipped; their
            samples count as done.
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
        """Throughput of the whole run, by wall time; 0 where no time has passed."""
        return self.samples / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def rank_samples_per_s(self) -> tuple[float, ...]:
        """Throughput of each rank outside of synchronisations.

        With what was discarded, which took its time as well.
        """
        work = zip(self.rank_samples, self.discarded_samples, self.busy_s, strict=True)
        return tuple(
            (samples + discarded) / busy_s if busy_s > 0 else 0.0
            for samples, discarded, busy_s in work
        )

    @property
    def efficiency(self) -> float:
        """`samples_per_s` over the sum of `rank_samples_per_s`; 0 if nothing was done.

        It is below 1 by what ranks wait for each other and reduce. It does not see that
        a device is slower on its share of a batch than on a whole one, nor a device
        that was left out. No measure where tuples hold one number for all ranks.
        """
        most = math.fsum(self.rank_samples_per_s)
        return self.samples_per_s / most if most > 0 else 0.0

    @property
    def shares(self) -> tuple[float, ...]:
        """Each rank's part of the samples; zeros where no rank had any."""
        total = self.samples or 1
        return tuple(samples / total for samples in self.rank_samples)

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Delivered time without data wait and transfer."""
        parts = zip(self.busy_s, self.data_wait_s, self.transfer_s, strict=True)
        return tuple(max(0.0, busy - data - transfer) for busy, data, transfer in parts)

    def totals(self: Kind) -> Kind:
        """The same with one number for all ranks together, in place of one per rank.

        Sums, and the largest divergence: `samples` and `samples_per_s` stay what they
        were, `rank_samples_per_s` is the mean rank's.
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
        """The fields alone, without what follows from them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def to_json(self) -> str:
        """The fields as text for a message; `from_json` gives an equal value."""
        return json.dumps(self.as_fields())

    @classmethod
    def from_json(cls: type[Kind], text: str) -> Kind:
        """Reads what `to_json` wrote.

        Raises:
            ProtocolError: it is not that.
        """
        try:
            return cls(**{k: _tuples(value) for k, value in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"expected {cls.__name__} as JSON, got {text[:80]!r}: {error}"
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite divergence or norm is None there."""
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
        window: its number; under ``sync`` that of the last step in the epoch.
    """

    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics(Metrics):
    """Metrics of an epoch; see `Metrics` for the attributes."""


class MetricsBook:
    """Adds up what ranks report, per window and per epoch.

    Windows may overlap: a rank that is already in the next one reports for that.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.begin_epoch(-1, 0.0)

    @property
    def samples(self) -> int:
        """Samples of the epoch so far, without discarded ones."""
        accounts = (self._total, *self._open.values())
        return round(sum(sum(account.counted["samples"]) for account in accounts))

    def begin_epoch(self, epoch: int, now_s: float) -> None:
        """Forgets the last epoch and begins this one."""
        self._epoch = epoch
        self._began_s = self._closed_s = now_s
        self._open: dict[int, _Account] = {}
        self._total = self._whole = _Account(self._world_size)

    def add(self, window: int, report: RankReport) -> None:
        """Adds a rank's report; it costs as much as it has scalars.

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
        """Ends a window; its time runs from the end of the last one.

        Args:
            window: its number; earlier ones that are still open count with it.
            now_s: the time.
            synchronisations: how many it covers.
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
        """Ends the epoch; what came after its last window counts in it.

        ``before`` is the book of its earlier parts, which ends with it.
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
    """Reports of one window, or of an epoch."""

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
        """Adds the account of a later time, which may be of fewer ranks."""
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
        """Makes room for ranks that have joined."""
        for name, values in self.counted.items():
            values += _zeros(name, world_size - len(values))
        self.world_size = max(self.world_size, world_size)

    def as_fields(self) -> dict[str, Any]:
        """Fields of `Metrics`, except time and place."""
        names = sorted(self.means)
        values = [(name, self.means[name].value) for name in names]
        counts = [(name, self.means[name].left_out) for name in names]
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
    """The field of `Metrics` with the sums of a field of `RankReport`."""
    return "rank_samples" if name == "samples" else name


def _total_of(name: str) -> Callable[[Iterable[float]], float]:
    return math.fsum if name in _TIMES else sum


def _zeros(name: str, world_size: int) -> list[float]:
    return [0.0 if name in _TIMES else 0] * world_size


def _no_nan(value: float) -> float:
    """The value, or infinity for NaN, so that values can be compared."""
    return math.inf if math.isnan(value) else value


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
