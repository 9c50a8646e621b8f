"""Chrome traces: units, order, rows, and the line format."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.monitor.trace import (
    BATCH,
    DATA_WAIT,
    SYNC,
    SYNC_WAIT,
    Span,
    spans_from_jsonl,
    spans_to_jsonl,
    to_chrome_trace,
)

spans = st.builds(
    Span,
    rank=st.integers(0, 3),
    name=st.text(max_size=5),
    category=st.sampled_from([BATCH, DATA_WAIT, SYNC, "other"]),
    start_s=st.floats(-1e3, 1e3),
    duration_s=st.floats(0, 10),
    args=st.dictionaries(st.text(max_size=3), st.integers() | st.none(), max_size=2),
)


def complete_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_times_are_microseconds_since_the_first_span() -> None:
    trace = to_chrome_trace(
        [
            Span(1, "wait", DATA_WAIT, 10.5, 0.25),
            Span(0, "batch 0", BATCH, 10.0, 0.002, {"samples": 32}),
        ]
    )
    first, second = complete_events(trace)
    assert (first["ts"], first["dur"], first["pid"]) == (0.0, 2000.0, 0)
    assert (second["ts"], second["dur"], second["pid"]) == (5e5, 2.5e5, 1)
    assert first["name"] == "batch 0"
    assert first["cat"] == BATCH
    assert first["args"] == {"samples": 32}


@given(st.integers(0, 2**32), st.floats(0, 1e6))
def test_spans_that_meet_do_not_overlap(seed: int, origin_s: float) -> None:
    draw = random.Random(seed)
    times_s = [origin_s]
    for _ in range(50):
        times_s.append(times_s[-1] + draw.uniform(1e-3, 1e-1))
    batches = [
        Span(0, "batch", BATCH, begin_s, end_s - begin_s)
        for begin_s, end_s in pairwise(times_s)
    ]
    events = complete_events(to_chrome_trace(batches))
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(events))


def test_rows_are_named_and_synchronisations_have_their_own() -> None:
    trace = to_chrome_trace(
        [
            Span(0, "batch 0", BATCH, 0.0, 1.0),
            Span(0, "sync wait", SYNC_WAIT, 0.5, 0.1),
            Span(0, "reduction", SYNC, 0.6, 1.0),
            Span(1, "batch 0", BATCH, 0.0, 1.0),
        ],
        {0: "fast"},
        {"speeds": [1]},
    )
    rows = {(e["pid"], e["name"]): e["tid"] for e in complete_events(trace)}
    assert [name for name, row in rows.items() if row] == [
        *((0, "sync wait"), (0, "reduction"))
    ]
    named = [
        (event["pid"], event["tid"], event["args"]["name"])
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    ]
    assert named == [
        *((0, 0, "fast"), (1, 0, "rank 1"), (0, 0, "training")),
        *((0, 1, "synchronisations"), (1, 0, "training")),
    ]
    assert trace["otherData"] == {"speeds": [1]}


@given(st.lists(spans, max_size=30))
def test_any_trace_is_sorted_and_json(items: list[Span]) -> None:
    trace = to_chrome_trace(items)
    json.dumps(trace, allow_nan=False)
    events = complete_events(trace)
    assert len(events) == len(items)
    assert [event["ts"] for event in events] == sorted(e["ts"] for e in events)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    assert all(type(event[key]) is int for event in events for key in ("ts", "dur"))
    named = {e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert named == {span.rank for span in items}


@given(st.lists(spans, max_size=5))
def test_lines_bring_spans_back(items: list[Span]) -> None:
    text = spans_to_jsonl(items)
    assert len(text.splitlines()) == len(items)
    assert spans_from_jsonl(text) == items


def test_an_empty_trace_is_valid() -> None:
    assert to_chrome_trace([])["traceEvents"] == []
    assert spans_from_jsonl("\n") == []


@pytest.mark.parametrize("line", ["{", "[]", '{"rank": 0}', ""])
def test_a_cut_line_is_skipped(line: str) -> None:
    """A killed rank may leave one."""
    span = Span(0, "batch", BATCH, 0.0, 1.0)
    good = spans_to_jsonl([span])
    assert spans_from_jsonl(good + line + "\n" + good) == [span, span]
