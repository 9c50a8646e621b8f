"""A line per rank: device, own speed, share of the samples, waiting. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RANKS_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """State of one rank; None for values not known yet.

    Attributes:
        rank: which.
        device: its name.
        memory_bytes: of the device; 0 if it was not found out.
        samples_per_s: what the rank delivers outside of synchronisations.
        share: its part of the samples.
        waiting: part of its time in synchronisations: for other ranks, and reducing.
    """

    rank: int
    device: str
    memory_bytes: int = 0
    samples_per_s: float | None = None
    share: float | None = None
    waiting: float | None = None


def rank_table(lines: Sequence[RankLine]) -> list[str]:
    """Aligned text with a heading; the first ranks of many."""
    shown = lines[:RANKS_SHOWN]
    has_memory = any(line.memory_bytes for line in shown)
    columns = [
        ("rank", ">", [str(line.rank) for line in shown]),
        ("device", "<", [line.device for line in shown]),
        ("memory", ">", [f"{line.memory_bytes / 1e9:.1f} GB" for line in shown]),
        ("samples/s", ">", [_cell(line.samples_per_s, ",.0f") for line in shown]),
        ("share", ">", [_cell(line.share, ".0%") for line in shown]),
        ("waiting", ">", [_cell(line.waiting, ".0%") for line in shown]),
    ]
    if not has_memory:
        del columns[2]
    rows = [""] * (len(shown) + 1)
    for heading, side, cells in columns:
        width = max(map(len, (heading, *cells)))
        for index, cell in enumerate((heading, *cells)):
            rows[index] += f"  {cell:{side}{width}}"
    more = len(lines) - len(shown)
    return [*(row.rstrip() for row in rows), *([f"  and {more} more"] if more else [])]


def waiting_parts(
    busy_s: Sequence[float], sync_wait_s: Sequence[float]
) -> tuple[float, ...]:
    """Part of each rank's time that it spent in synchronisations."""
    return tuple(
        wait / (busy + wait) if busy + wait > 0 else 0.0
        for busy, wait in zip(busy_s, sync_wait_s, strict=True)
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
