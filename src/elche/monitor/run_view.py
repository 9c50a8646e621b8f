"""State of a run as text: samples, rate, time left, a line per rank. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elche.monitor.event_records import Record
from elche.monitor.page.rows import event_text, start_s
from elche.monitor.run_history import RunHistory, rank_row, run_row

BAR_CELLS = 24
RANKS_SHOWN = 16
EVENTS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """State of one rank; None for values not known yet.

    Attributes:
        rank: the rank.
        device: the device's name.
        memory_bytes: memory of the device; 0 if unknown.
        samples_per_s: throughput outside of synchronisations.
        share: fraction of the samples.
        waiting: fraction of time in synchronisations: waiting and reducing.
    """

    rank: int
    device: str
    memory_bytes: int = 0
    samples_per_s: float | None = None
    share: float | None = None
    waiting: float | None = None


def rank_table(lines: Sequence[RankLine]) -> list[str]:
    """Table of ranks as aligned text with a heading; only the first ranks of many."""
    shown = lines[:RANKS_SHOWN]
    columns = [
        ("rank", ">", [str(line.rank) for line in shown]),
        ("device", "<", [line.device for line in shown]),
        ("memory", ">", [f"{line.memory_bytes / 1e9:.1f} GB" for line in shown]),
        ("samples/s", ">", [cell(line.samples_per_s, ",.0f") for line in shown]),
        ("share", ">", [cell(line.share, ".0%") for line in shown]),
        ("waiting", ">", [cell(line.waiting, ".0%") for line in shown]),
    ]
    if not any(line.memory_bytes for line in shown):
        del columns[2]
    more = len(lines) - len(shown)
    rows = [f"  {row}" for row in aligned(columns)]
    return [*rows, *([f"  and {more} more"] if more else [])]


def aligned(columns: Sequence[tuple[str, str, Sequence[str]]]) -> list[str]:
    """Formats a table; each column has a heading, an alignment (< or >), and cells."""
    padded = [
        [
            f"{cell:{side}{max(map(len, (heading, *cells)))}}"
            for cell in (heading, *cells)
        ]
        for heading, side, cells in columns
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def rank_lines(
    devices: Mapping[int, str], window: Record | None, memory_bytes: Sequence[int] = ()
) -> tuple[RankLine, ...]:
    """State of the ranks, by their devices and a window, if one is known."""
    lines = []
    for rank, device in sorted(devices.items()):
        row = rank_row(window, rank) if window else {}
        line = RankLine(
            rank=rank,
            device=device,
            memory_bytes=memory_bytes[rank] if memory_bytes else 0,
            samples_per_s=row.get("samples_per_s"),
            share=row.get("share"),
            waiting=row.get("sync_wait"),
        )
        lines.append(line)
    return tuple(lines)


def run_head(history: RunHistory, *, bar: bool = False) -> str:
    """One line: epoch, a bar if asked for, samples, rate, time left.

    Rates cover the last seconds, or the last window if that is longer. Efficiency is
    the run's rate over the sum of the devices' own speeds.
    """
    if not history.epochs:
        return "no epoch has begun"
    epoch, done = history.epochs[-1], history.epoch_samples
    text = f"epoch {epoch['epoch']} ({epoch['policy']})  "
    if bar:
        part = min(1.0, done / epoch["samples"]) if epoch["samples"] else 0.0
        full = round(part * BAR_CELLS)
        text += "━" * full + "╌" * (BAR_CELLS - full) + "  "
    text += f"{done:,} of {epoch['samples']:,} samples"
    recent = history.recent()
    row = run_row(recent) if recent else {}
    if not (rate := row.get("samples_per_s")):
        return text
    text += f"  {rate:,.0f}/s, {row['efficiency']:.0%} of what the devices deliver"
    left_s = max(0, epoch["samples"] - done) / rate
    if history.is_training:
        text += f", {clock(left_s)} left"
        if (later := (epoch.get("epochs") or 0) - epoch["epoch"] - 1) > 0:
            run_s = left_s + later * epoch["samples"] / rate
            text += f" in the epoch, {clock(run_s)} in the run"
    return text


def run_lines(history: RunHistory) -> list[str]:
    """Lines to display: one for the run, its ranks' table, its newest events."""
    ranks = {rank: each["device"] for rank, each in history.ranks.items()}
    table = rank_table(rank_lines(ranks, history.recent()))
    newest, first_s = history.events[-EVENTS_SHOWN:], start_s(history)
    events = [f"  {clock(e['t'] - first_s)}  {event_text(e)}" for e in newest]
    return [run_head(history, bar=True), *table, *events]


def clock(seconds: float) -> str:
    """Formats seconds like 0:05 and 2:03:04."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def cell(value: float | None, form: str, unit: str = "") -> str:
    """Formats a value of a table; "-" if it is not known."""
    return "-" if value is None else f"{value:{form}}{unit}"
