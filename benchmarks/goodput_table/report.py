"""The table of goodput, from records. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.goodput_table.design import Setting, bench_name
from benchmarks.goodput_table.records import CONTROL, Record, Records
from benchmarks.hetero.verdict import MIN_WINDOWS, MOST_OVERRUN
from benchmarks.paired import Interval, mean_interval
from elche.cadence.convergence import UPDATES, sample_efficiency
from elche.monitor.run_view import aligned

_KINDS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one setting, over its repetitions.

    Attributes:
        setting: its name.
        contender: who.
        repeats: runs.
        efficiency: samples per second over the sum of what each device delivers alone.
        bound: the best that this way of training could have there.
        throughput: samples per second over the fastest device's.
        sample_efficiency: by the study's table (`elche.cadence.convergence`), for this
            number of ranks and the windows that were measured; not by this run's loss.
        goodput: the product of the last two.
        windows: median of synchronisations.
        note: what a reader should know.
    """

    setting: str
    contender: str
    repeats: int
    efficiency: Interval
    bound: float | None
    throughput: Interval
    sample_efficiency: float
    goodput: Interval
    windows: float
    note: str


def sample_worth(setting: Setting, record: Record) -> float:
    """What a sample is worth by the study's table; 1 on one device and for DDP."""
    if record.policy not in UPDATES:
        return 1.0
    return sample_efficiency(
        record.policy,
        len(setting.speeds),
        record.window_batches,
        record.late_batches,
        optimizer=_KINDS[setting.optimizer],
    )


def table(
    settings: Sequence[Setting], records: Records, *, seconds: float
) -> list[Row]:
    """A row for every cell that was measured, with its devices alone."""
    rows = []
    for setting in settings:
        alone = records.alone(setting.devices_key, setting.speeds)
        names = [
            name
            for name in dict.fromkeys(key[1] for key in records.by_cell)
            if records.repeats(setting.name, name)
        ]
        for name in names if alone is not None else []:
            assert alone is not None
            runs = records.repeats(setting.name, name)
            config = setting.config(name, seconds=seconds, alone_s=seconds)
            worth = [sample_worth(setting, run) for run in runs]
            rates = [run.samples_per_s for run in runs]
            rows.append(
                Row(
                    setting=setting.name,
                    contender=name,
                    repeats=len(runs),
                    efficiency=mean_interval([rate / sum(alone) for rate in rates]),
                    bound=config.bound(bench_name(name), alone),
                    throughput=mean_interval([rate / max(alone) for rate in rates]),
                    sample_efficiency=statistics.fmean(worth),
                    goodput=mean_interval(
                        [
                            rate * each / max(alone)
                            for rate, each in zip(rates, worth, strict=True)
                        ]
                    ),
                    windows=statistics.median(run.windows for run in runs),
                    note=_note(runs),
                )
            )
    return rows


def _note(runs: Sequence[Record]) -> str:
    remarks = []
    chosen = sorted({run.policy for run in runs if run.contender.startswith("auto")})
    if chosen:
        remarks.append("became " + ", ".join(chosen))
    if min(run.windows for run in runs) < MIN_WINDOWS:
        remarks.append(f"under {MIN_WINDOWS} windows")
    overrun = max(run.overrun for run in runs)
    if overrun > MOST_OVERRUN:
        remarks.append(f"overrun {overrun:.0%}")
    return "; ".join(remarks)


def lines_of(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    columns = {
        "setting": [row.setting for row in rows],
        "contender": [row.contender for row in rows],
        "n": [str(row.repeats) for row in rows],
        "hardware eff.": [_with_margin(row.efficiency) for row in rows],
        "bound": [_number(row.bound) for row in rows],
        "of it": [
            _number(row.bound and row.efficiency.mean / row.bound) for row in rows
        ],
        "over fastest": [_with_margin(row.throughput) for row in rows],
        "study's sample eff.": [f"{row.sample_efficiency:.3f}" for row in rows],
        "goodput": [_with_margin(row.goodput) for row in rows],
        "windows": [f"{row.windows:.0f}" for row in rows],
        "note": [row.note for row in rows],
    }
    return "\n".join(aligned([(head, "<", cells) for head, cells in columns.items()]))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def control_lines(settings: Sequence[Setting], records: Records) -> list[str]:
    """How quiet the machine was, and what failed."""
    lines = []
    for key in dict.fromkeys(setting.devices_key for setting in settings):
        runs = records.repeats(key, CONTROL)
        speeds = next(s.speeds for s in settings if s.devices_key == key)
        alone = records.alone(key, speeds)
        if runs and alone is not None:
            parts = ", ".join(f"{r.samples_per_s / sum(alone):.3f}" for r in runs)
            lines.append(f"control, {key}: {parts} of the devices alone")
    for failed in records.errors.values():
        where = f"{failed.setting}, {failed.contender}, repeat {failed.repeat}"
        lines.append(f"not measured: {where}: {failed.error}")
    return lines


def _with_margin(value: Interval) -> str:
    margin = value.high - value.mean
    return f"{value.mean:.3f}" + (f" ±{margin:.3f}" if math.isfinite(margin) else "")
