"""Timelines of ranks as Chrome traces, which Perfetto and chrome://tracing open.

Pure: spans in, JSON-able values out. The format is the Trace Event Format, of
which only complete events ("X") and metadata events ("M") are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from elche.errors import ConfigError

BATCH = "batch"
DATA_WAIT = "data wait"
SYNC = "sync"
EVALUATION = "evaluation"

_US_PER_S = 1e6
_ROUNDING_US = 1


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank did for a while.

    Attributes:
        rank: who.
        name: what, as the timeline's label.
        category: `BATCH`, `DATA_WAIT`, `SYNC`, `EVALUATION` or another word.
        start_s: when it began, in seconds of a clock that all ranks share.
        duration_s: how long it took, in seconds.
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
    """Convert spans to a Chrome trace; `json.dump` makes the file of it.

    Every rank is a process with one row. Spans of a row must nest; one that
    reaches out of another (a reduction that outlasts its batch) goes to a further
    row of the same rank. Times are whole microseconds since the first span's start:
    viewers cut fractions off, after which spans that met would overlap.

    Args:
        spans: in any order.
        rank_names: label of each rank; ``rank N`` where absent.
        metadata: JSON-able facts about the run, kept under ``otherData``.
    """
    ordered = sorted(spans, key=lambda s: (s.start_s, -s.duration_s, s.rank))
    origin_s = ordered[0].start_s if ordered else 0.0
    rows: dict[int, list[_Row]] = {}
    events = [_complete_event(span, origin_s, rows) for span in ordered]
    names = dict(rank_names or {})
    for rank in rows:
        names.setdefault(rank, f"rank {rank}")
    return {
        "traceEvents": [
            *_name_events(names, {rank: len(own) for rank, own in rows.items()}),
            *sorted(events, key=lambda event: (event["ts"], -event["dur"])),
        ],
        "displayTimeUnit": "ms",
        "otherData": dict(metadata or {}),
    }


def spans_to_jsonl(spans: Iterable[Span]) -> str:
    """One JSON object per line, for files that ranks write on their own."""
    rows = ({name: getattr(span, name) for name in _FIELDS} for span in spans)
    return "".join(json.dumps(row) + "\n" for row in rows)


def spans_from_jsonl(text: str) -> list[Span]:
    """Read what `spans_to_jsonl` wrote; blank lines are skipped.

    Raises:
        ConfigError: on a line that is not a span, with its number.
    """
    spans = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            spans.append(Span(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"line {number} is not a span: {error}") from error
    return spans


class _Row:
    """A row of the timeline: a stack of spans that have not ended yet."""

    def __init__(self) -> None:
        self._open_ends_us: list[int] = []
        self._free_from_us = 0

    def place(self, begin_us: int, end_us: int) -> tuple[int, int] | None:
        """Begin and end where the span nests in this row; None if it does not.

        Spans that meet may overlap by rounding: a microsecond is cut off.
        """
        while self._open_ends_us and self._open_ends_us[-1] <= begin_us + _ROUNDING_US:
            self._free_from_us = max(self._free_from_us, self._open_ends_us.pop())
        begin_us = max(begin_us, self._free_from_us)
        end_us = max(begin_us, end_us)
        if self._open_ends_us:
            if end_us > self._open_ends_us[-1] + _ROUNDING_US:
                return None
            end_us = min(end_us, self._open_ends_us[-1])
        self._open_ends_us.append(end_us)
        return begin_us, end_us


def _complete_event(
    span: Span, origin_s: float, rows_by_rank: dict[int, list[_Row]]
) -> dict[str, Any]:
    rows = rows_by_rank.setdefault(span.rank, [])
    start_s = span.start_s - origin_s
    begin_us = round(start_s * _US_PER_S)
    end_us = round((start_s + span.duration_s) * _US_PER_S)
    rows.append(_Row())  # where it nests in no other
    tries = ((at, row.place(begin_us, end_us)) for at, row in enumerate(rows))
    row, (ts, until) = next((at, placed) for at, placed in tries if placed)
    if row < len(rows) - 1:
        rows.pop()
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "pid": span.rank,
        "tid": row,
        "ts": ts,
        "dur": until - ts,
        "args": dict(span.args),
    }


def _name_events(
    names: Mapping[int, str], num_rows: Mapping[int, int]
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for rank, name in sorted(names.items()):
        rows = ["training", *["overlapped"] * (num_rows.get(rank, 1) - 1)]
        events += [
            _metadata_event("process_name", rank, 0, {"name": name}),
            *(
                _metadata_event("thread_name", rank, tid, {"name": row})
                for tid, row in enumerate(rows)
            ),
        ]
    return events


def _metadata_event(
    name: str, pid: int, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}
