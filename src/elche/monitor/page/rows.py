"""Rows of the page's charts: windows of a run, coarser with its length. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
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
    """Windows of a history, merged to a bounded number of rows.

    Args:
        history: the run; after another one is assigned, `follow` reads that.
        most: most rows.

    Attributes:
        rows: rows of at least the least duration, so that a chart can append them.
        version: number of times that all rows were replaced.
    """

    def __init__(self, history: RunHistory, most: int = MOST_ROWS) -> None:
        self.history, self._most = history, most
        self.version, self._least_s, self._seen = 0, LEAST_S, 0
        self.rows: list[Record] = []
        self._open: list[Record] = []
        self._of: tuple[RunHistory | None, int] = None, 0
        self.follow()

    def follow(self) -> None:
        """Takes the windows that the history has received since the last call."""
        if self._of != (self.history, self.history.revision):
            self._clear()
        for window in self.history.windows[self._seen :]:
            self._add(window)
        self._seen = len(self.history.windows)
        while len(self.rows) > self._most:
            rows, self.rows, self._open = [*self.rows, *self._open], [], []
            self._least_s *= 2
            self.version += 1
            for row in rows:
                self._add(row)

    def _clear(self) -> None:
        self._of = self.history, self.history.revision
        self.rows, self._open = [], []
        self._least_s, self._seen = LEAST_S, 0
        self.version += 1

    def _add(self, window: Record) -> None:
        self._open.append(window)
        if math.fsum(each["duration_s"] for each in self._open) >= self._least_s:
            self.rows.append(merged(self._open))
            self._open = []


def start_s(history: RunHistory) -> float:
    """Returns the Unix time of the run's start; 0 if it has not started."""
    return float(history.records[0]["t"]) if history.records else 0.0


def row_columns(
    history: RunHistory, rows: Sequence[Record], ranks: int, names: Sequence[str]
) -> dict[str, list[float]]:
    """Returns the columns of all charts over time and samples.

    Those of a rank end with its number; scalars, NaN where a row lacks one, are named
    ``value_0`` and so on in the order of ``names``.
    """
    return columns(
        {
            **run_row(row),
            "time": 1000 * (row["t"] - start_s(history)),
            **{
                f"{name}_{rank}": value
                for rank in range(ranks)
                for name, value in rank_row(row, rank).items()
            },
            **{
                f"value_{number}": row["values"].get(name, math.nan)
                for number, name in enumerate(names)
            },
        }
        for row in rows
    )


def event_columns(history: RunHistory, most: int) -> dict[str, list[Any]]:
    """Returns the newest events: their places on both axes, and their text."""
    times_s = [window["t"] for window in history.windows]
    events = history.events[-most:]
    before = [bisect_right(times_s, event["t"]) - 1 for event in events]
    return {
        "time": [1000 * (event["t"] - start_s(history)) for event in events],
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

    They count in seconds before the newest window. The parts of a window are drawn one
    after the other; in truth they alternate.
    """
    bars: dict[str, list[Any]] = {name: [] for name in ("rank", "part", "left", "end")}
    windows = history.windows[-2000:]
    recent = [each for each in windows if each["t"] > windows[-1]["t"] - SPAN_S]
    for window in thinned(recent, round(SPAN_S)):
        for rank in range(min(ranks, len(window["busy_s"]))):
            figures, whole_s = rank_row(window, rank), window["duration_s"]
            time_s = min(whole_s, window["busy_s"][rank] + window["sync_wait_s"][rank])
            left_s = window["t"] - windows[-1]["t"] - whole_s
            for part in PARTS:
                end_s = left_s + figures[part] * time_s
                row = str(rank), part, left_s, end_s
                for column, value in zip(bars.values(), row, strict=True):
                    column.append(value)
                left_s = end_s
    return bars
