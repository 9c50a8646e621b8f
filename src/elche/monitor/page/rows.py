"""Rows of the page's charts: windows of a run, coarser with its length. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, final

from elche.monitor.event_records import Record, merged
from elche.monitor.run_history import RunHistory, columns, rank_row, run_row, thinned

MOST_ROWS: Final = 1000
"""Most rows of a chart; beyond it the rows' least duration doubles."""
LEAST_S: Final = 1.0
"""Least duration (s) of a row; shorter windows are merged."""
SPAN_S: Final = 60.0
"""Length (s) of the timeline."""
PARTS: Final = ("data_wait", "transfer", "compute", "sync_wait")
"""Parts of a rank's time that the timeline shows, in the order of its bars."""


@final
class ChartRows:
    """Windows of a history as they are now, merged to at most ``most`` rows.

    Later rows begin with the earlier ones, until the least duration doubles, the
    history is merged, or the run restarts.
    """

    def __init__(self, history: RunHistory, most: int = MOST_ROWS) -> None:
        self.history, least_s = history, LEAST_S
        self.rows = _of_duration(history.windows, least_s)
        while len(self.rows) > most:
            least_s *= 2
            self.rows = _of_duration(self.rows, least_s)
        # A restart trains some samples again. The lost line over samples ends where the
        # new one begins, so that none runs backwards; over time both are shown.
        samples = [row["samples"] for row in reversed(self.rows)]
        least = [*accumulate(samples, min)][::-1]
        self.rows = [
            row if row["samples"] <= later else row | {"samples": math.nan}
            for row, later in zip(self.rows, least, strict=True)
        ]


def _of_duration(windows: Sequence[Record], least_s: float) -> list[Record]:
    """Merges neighbouring windows to rows; the last ones wait until they suffice."""
    rows, first, duration_s = [], 0, 0.0
    for number, window in enumerate(windows, 1):
        duration_s += window["duration_s"]
        if duration_s > least_s - 1e-9:
            rows.append(merged(windows[first:number]))
            first, duration_s = number, 0.0
    return rows


def start_s(history: RunHistory) -> float:
    """Returns the Unix time of the run's start; 0 if it has not started."""
    return float(history.records[0]["t"]) if history.records else 0.0


def row_columns(
    history: RunHistory, rows: Sequence[Record], ranks: int, names: Sequence[str]
) -> dict[str, list[float]]:
    """Returns the columns of all charts over time (s) and samples.

    A rank's columns end with its number. Scalars (NaN where a row lacks one) are named
    ``value_0`` and so on, in the order of ``names``.
    """
    found = []
    for row in rows:
        values = {**run_row(row), "time": row["t"] - start_s(history)}
        for rank in range(ranks):
            values |= {f"{k}_{rank}": v for k, v in rank_row(row, rank).items()}
        for number, name in enumerate(names):
            values[f"value_{number}"] = row["values"].get(name, math.nan)
        found.append(values)
    return columns(found)


def event_columns(history: RunHistory, most: int) -> dict[str, list[Any]]:
    """Returns the newest events: their places on both axes, and their text."""
    times_s = [window["t"] for window in history.windows]
    events = history.events[-most:]
    before = [bisect_right(times_s, event["t"]) - 1 for event in events]
    return {
        "time": [event["t"] - start_s(history) for event in events],
        "samples": [history.windows[at]["samples"] if at >= 0 else 0 for at in before],
        "text": [event_text(event) for event in events],
    }


def event_text(event: Record) -> str:
    """Returns an event as one line: rank, kind and reason."""
    rank = event.get("rank")
    of = "" if rank is None or rank < 0 else f"rank {rank} "
    return f"{of}{event['name']}: {event['text']}"


def bar_columns(history: RunHistory, ranks: int) -> dict[str, list[Any]]:
    """Returns bars of the last minute: each rank's time in each window by its parts.

    The parts of a window are drawn one after the other; in truth they alternate.
    """
    bars: list[tuple[str, str, float, float]] = []
    windows = history.windows[-2000:]
    recent = [each for each in windows if each["t"] > windows[-1]["t"] - SPAN_S]
    for window in thinned(recent, round(SPAN_S)):
        for rank in range(min(ranks, len(window["busy_s"]))):
            figures, whole_s = rank_row(window, rank), window["duration_s"]
            time_s = min(whole_s, window["busy_s"][rank] + window["sync_wait_s"][rank])
            left = window["t"] - start_s(history) - whole_s
            for part in PARTS:
                right = left + figures[part] * time_s
                bars.append((str(rank), part, left, right))
                left = right
    names = ("rank", "part", "left", "right")
    return {name: [bar[at] for bar in bars] for at, name in enumerate(names)}
