"""Timelines of ranks as Chrome traces, which Perfetto and chrome://tracing open.

Pure: spans in, JSON-able values out. The format is the Trace Event Format, of
which only complete events ("X"), instants ("i") and metadata ("M") are written.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

BATCH = "batch"
DATA_WAIT = "data wait"
SYNC = "sync"
SYNC_WAIT = "sync wait"
EVENT = "event"
"""Category of a mark: an instant of the whole run, whose duration is ignored."""

_ROWS = ("training", "synchronisations")


@dataclass(frozen=True, slots=True)
class Span:
    """A time interval of a rank's activity.

    Attributes:
        rank: the rank.
        name: label in the timeline.
        category: `BATCH`, `DATA_WAIT`, `SYNC`, `SYNC_WAIT` or another category.
        start_s: start in seconds, on a clock that all ranks share.
        duration_s: duration in seconds.
        args: details shown when the span is selected; JSON-able values.
    """

    rank: int
    name: str
    category: str
    start_s: float
    duration_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


_FIELDS = tuple(each.name for each in fields(Span))


def to_chrome_trace(
    spans: Iterable[Span],
    rank_names: Mapping[int, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Converts spans to a Chrome trace; `json.dump` makes the file of it.

    Every rank is a process with one row for training, and one for synchronisations and
    waits for them, which may overlap its batches. Times are whole microseconds since
    the first span's start. Viewers truncate fractions, which would make adjacent spans
    overlap.

    Args:
        spans: spans in any order.
        rank_names: label of each rank; ``rank N`` by default.
        metadata: JSON-able facts about the run, kept under ``otherData``.
    """
    ordered = sorted(spans, key=lambda s: (s.start_s, -s.duration_s, s.rank))
    origin_s = ordered[0].start_s if ordered else 0.0
    names = dict(rank_names or {})
    ends_us = {(rank, 0): 0 for rank in names}
    events: list[dict[str, Any]] = []
    for span in ordered:
        row = span.rank, int(span.category in (SYNC, SYNC_WAIT))
        begin_us, end_us = (
            round(1e6 * (span.start_s - origin_s + each_s))
            for each_s in (0.0, span.duration_s)
        )
        event = {"name": span.name, "cat": span.category, "pid": span.rank}
        event |= {"tid": row[1], "args": dict(span.args)}
        if span.category == EVENT:
            events.append({"ph": "i", "s": "g", "ts": begin_us, "dur": 0, **event})
            continue
        if ends_us.get(row) == begin_us + 1:  # adjacent before rounding
            begin_us += 1
        ends_us[row] = max(begin_us, end_us)
        names.setdefault(span.rank, f"rank {span.rank}")
        dur = ends_us[row] - begin_us
        events.append({"ph": "X", "ts": begin_us, "dur": dur, **event})
    labels = [("process_name", rank, 0, names[rank]) for rank in sorted(names)]
    labels += [("thread_name", *row, _ROWS[row[1]]) for row in sorted(ends_us)]
    heads: list[dict[str, Any]] = [
        {"ph": "M", "name": n, "pid": p, "tid": t, "ts": 0, "args": {"name": a}}
        for n, p, t, a in labels
    ]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    about = {"displayTimeUnit": "ms", "otherData": dict(metadata or {})}
    return {"traceEvents": heads + events, **about}


def spans_to_jsonl(spans: Iterable[Span]) -> str:
    """Writes one JSON object per line, for the files of single ranks."""
    rows = ({name: getattr(span, name) for name in _FIELDS} for span in spans)
    return "".join(json.dumps(row) + "\n" for row in rows)


def spans_from_jsonl(text: str) -> list[Span]:
    """Reads the output of `spans_to_jsonl`; broken lines are skipped."""
    spans = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            spans.append(Span(**json.loads(line)))
    return spans
