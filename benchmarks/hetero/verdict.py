"""Conclusions from repeated runs of the contenders, and their reliability."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from benchmarks.paired import Interval, mean_interval, spread
from elche.demo.compare import ContenderRun
from elche.monitor.results import ContenderResult

MOST_OVERRUN = 0.02
"""Largest overrun, as a fraction, at which an emulation is still accurate."""

MIN_CONTROL = 0.98
"""Least efficiency of the control: all devices at once, without communication."""

MIN_WINDOWS = 200
"""Windows that the standard gate wants of a run under ``cadence``."""

CONTROL = "indep"
Bound: TypeAlias = Callable[[str, Sequence[float]], float | None]
REFERENCE = "solo-0"


class BenchVerdict:
    """Medians, spreads and paired differences of contenders.

    Args:
        runs: by contender, one run per seed in the same order of seeds for all.
        num_devices: how many devices there are.
        time_capped: evaluation losses are not comparable, and are left out.
        allow_noise: do not reject.
        bound: best possible efficiency of a contender by name, given the rates of the
            devices alone; None where there is none.

    Attributes:
        control: median efficiency of the control, None if it was not run.
        reason: why the run should be rejected, "" if it should not.
        rejected: whether it is.
        warnings: what a reader should know before believing the figures.
    """

    def __init__(
        self,
        runs: Mapping[str, Sequence[ContenderRun]],
        num_devices: int,
        time_capped: bool = False,
        allow_noise: bool = False,
        bound: Bound = lambda name, alone: None,
    ) -> None:
        self._bound = bound
        self._names = tuple(runs)
        self._runs = runs
        self._num_devices = num_devices
        self._time_capped = time_capped
        self._rates = {
            name: [rate_of(name, run) for run in own] for name, own in runs.items()
        }
        self._sums = self._summed_solo_rates()
        self.control = _median(self._efficiencies(CONTROL))
        self.reason = self._why_rejected()
        self.rejected = bool(self.reason) and not allow_noise
        self.warnings = self._warnings()

    @property
    def cadence_windows(self) -> float | None:
        """Median number of windows under ``cadence``, None if that was not run."""
        return self._windows("elche-cadence") if "elche-cadence" in self._runs else None

    @property
    def table(self) -> list[ContenderResult]:
        """A row per contender."""
        return [self._row(name) for name in self._names]

    @property
    def remarks(self) -> list[str]:
        """Lines below the table."""
        lines = []
        for name in self._names:
            interval = self._against_reference(name)
            if interval is not None:
                lines.append(
                    f"{name}: evaluation loss {interval.mean:+.2%} against {REFERENCE}"
                    f" at equal samples (95 % interval {interval.low:+.2%} to"
                    f" {interval.high:+.2%}, {len(self._losses(name))} seeds)"
                )
        if self.control is not None:
            lines.append(
                f"control: all devices at once without communication deliver"
                f" {self.control:.1%} of the sum of each alone"
            )
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines.append("Emulated: every device is a process on this machine's CPU.")
        if self.reason:
            word = "REJECTED" if self.rejected else "noise allowed"
            lines.append(f"{word}: {self.reason}")
        return lines

    def _row(self, name: str) -> ContenderResult:
        runs = self._runs[name]
        losses = self._losses(name)
        rates = self._rates[name]
        remarks = [*dict.fromkeys(device for run in runs for device in run.devices)]
        if name == CONTROL:
            remarks = ["no communication: the control"]
        elif not name.startswith("solo-"):
            remarks = []
        windows = self._windows(name)
        if windows:
            remarks.append(f"{windows:.0f} synchronisations")
        sent = statistics.median(_sent_per_sample(run) for run in runs)
        if sent >= 1.0:  # the kernel itself says a little on every link
            remarks.append(f"{_in_bytes(sent)} per sample on the link")
        overrun = max(overrun_share(run) for run in runs)
        if overrun > MOST_OVERRUN:
            remarks.append(f"overrun {overrun:.1%}")
        return ContenderResult(
            name=name,
            samples_per_s=statistics.median(rates),
            samples_per_s_spread=spread(rates) if len(rates) > 1 else None,
            efficiency=_median(self._efficiencies(name)),
            bound=self._bound_of(name),
            eval_loss=_median(losses),
            note=", ".join(remarks),
        )

    def _summed_solo_rates(self) -> list[float]:
        """Per seed, what all devices deliver alone; empty if one was left out."""
        alone = [name for name in self._names if name.startswith("solo-")]
        if len(alone) < self._num_devices:
            return []
        columns = zip(*(self._rates[name] for name in alone), strict=True)
        return [sum(rates) for rates in columns]

    def _bound_of(self, name: str) -> float | None:
        """Best possible efficiency by the medians of the devices alone."""
        if not self._sums:
            return None
        alone = [f"solo-{index}" for index in range(self._num_devices)]
        return self._bound(name, [statistics.median(self._rates[n]) for n in alone])

    def _efficiencies(self, name: str) -> list[float]:
        """Per seed, the rate over the sum of the same seed's rates alone."""
        if name not in self._rates or not self._sums:
            return []
        pairs = zip(self._rates[name], self._sums, strict=True)
        return [rate / total for rate, total in pairs]

    def _losses(self, name: str) -> list[float]:
        """Per seed, the loss after all samples; empty where it was not reached."""
        capped = name == CONTROL or (name.startswith("solo-") and name != REFERENCE)
        if self._time_capped or capped or name not in self._runs:
            return []
        return [run.curve()[-1][2] for run in self._runs[name]]

    def _against_reference(self, name: str) -> Interval | None:
        """Relative paired difference of elche's loss from one device's."""
        ours, theirs = self._losses(name), self._losses(REFERENCE)
        if not name.startswith("elche-") or len(theirs) < 2:
            return None
        ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
        if not all(math.isfinite(ratio) for ratio in ratios):
            return None
        return mean_interval([ratio - 1.0 for ratio in ratios])

    def _windows(self, name: str) -> float | None:
        """Median number of windows; None for contenders without."""
        if not name.startswith("elche-"):
            return None
        return statistics.median(
            float(run.ranks[0]["windows"]) for run in self._runs[name]
        )

    def _why_rejected(self) -> str:
        if self.control is None or self.control >= MIN_CONTROL:
            return ""
        return (
            f"the control {CONTROL} delivers {self.control:.3f} of the sum of the"
            f" devices alone, at least {MIN_CONTROL} is needed: the machine was busy;"
            " measure again when it is quiet"
        )

    def _warnings(self) -> list[str]:
        warnings = []
        windows = self.cadence_windows
        if windows is not None and windows < MIN_WINDOWS:
            warnings.append(
                f"elche-cadence had {windows:.0f} windows; the standard gate wants"
                f" {MIN_WINDOWS}: raise --seconds"
            )
        for name in self._names:
            overrun = statistics.median(map(overrun_share, self._runs[name]))
            if overrun > MOST_OVERRUN:
                warnings.append(
                    f"{name}: real computing exceeded the emulated time by"
                    f" {overrun:.1%}: the machine was busy or is too slow"
                )
        if self.control is None:
            warnings.append(
                f"no control: {CONTROL} or a device alone was left out, so nothing"
                " says how quiet the machine was"
            )
        return warnings


def rate_of(name: str, run: ContenderRun) -> float:
    """Samples per second of a run; the control's ranks each count for themselves."""
    ranks = len(run.ranks) if name == CONTROL else 1
    return sum(run.rate(rank) for rank in range(ranks))


def overrun_share(run: ContenderRun) -> float:
    """Overrun of emulated compute as a fraction of it, on the worst rank."""
    emulated = [result for result in run.ranks if result["nominal_s"]]
    shares = [float(r["overrun_s"] / r["nominal_s"]) for r in emulated]
    return max(shares, default=0.0)


def _sent_per_sample(run: ContenderRun) -> float:
    """Bytes that all ranks sent over their links for each sample of the run."""
    sent = sum(float(rank["sent_bytes"]) for rank in run.ranks)
    return sent / float(run.ranks[0]["samples"])


def _in_bytes(value: float) -> str:
    """A number of bytes in words."""
    for unit in ("bytes", "kB", "MB"):
        if value < 1000.0 or unit == "MB":
            break
        value /= 1000.0
    return f"{value:.3g} {unit}"


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
