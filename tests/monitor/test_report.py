"""A run in words: its figures are true and finite, whatever its file has."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.monitor.event_records import merged
from elche.monitor.report import PARTS, sentences, time_parts
from elche.monitor.run_history import RunHistory, rank_row
from tests.harness.event_lines import START_S, event, lines, records

END = {"t": START_S + 8, "kind": "end", "exit_codes": [0, 137], "reason": "killed"}


def history_of(*found: Any) -> RunHistory:
    history = RunHistory()
    history.feed(lines(*found))
    return history


def run_of(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """A run with a window of a second for each of these changes to it."""
    found = list(records(len(changes)))
    windows = [each for each in found if each["kind"] == "window"]
    for window, change in zip(windows, changes, strict=True):
        window.update(change)
    return found


def test_a_run_in_words() -> None:
    found = run_of({"discarded_samples": [0, 8]}, {"values": {"loss": 0.25}})
    history = history_of(*found, event("died", 7, rank=1), END)
    assert sentences(history) == [
        "train.py '<b>' ran on box, policy sync, devices 1 x <i>cpu0, 1 x <i>cpu1.",
        "It trained 120 samples/s: 80% of what its devices deliver while they do not "
        "synchronise (150), and 1.20 times what the fastest one delivers (rank 0, 100)."
        " No device was run alone for these figures.",
        "It trained 240 samples in 0:02, epochs begun: 1.",
        "loss went from 1 to 0.25.",
        "The ranks' time: 60.0% computing, 20.0% waiting for data, 0.0% transfer to "
        "devices, 20.0% waiting for other ranks and reducing, 0.0% other (the loop's "
        "own work, starts of epochs).",
        "8 samples were trained and discarded.",
        "At 0:07 rank 1 died: died <script>.",
        "It ended after 0:08 with exit codes 137 of rank 1: killed.",
    ]


def test_time_outside_of_batches_is_named() -> None:
    """Of two ranks one reports half of a window, the other one nothing."""
    times = {"busy_s": [0.5, 0.0], "sync_wait_s": [0.0, 0.0], "data_wait_s": [0, 0]}
    history = history_of(*run_of(times))
    parts = time_parts(history, merged(history.windows))
    assert (parts["compute"], parts["other"]) == pytest.approx((0.5, 0.5))


def test_samples_of_a_restart_count_once() -> None:
    first, second = run_of({}), run_of({"samples": 150})[1:]
    text = " ".join(sentences(history_of(*first, *second)))
    assert "trained 150 samples in" in text
    assert "90 samples were trained again after restarts." in text
    assert "no end" in text
    assert "started 2 times" in text


def test_devices_count_while_they_were_there() -> None:
    """A rank that died halfway lowers what the devices deliver from then on."""
    gone = {"rank_samples": [80, 0], "device_samples_per_s": [100.0]}
    text = " ".join(sentences(history_of(*run_of({}, gone))))
    assert "It trained 100 samples/s: 80% of what" in text
    assert "synchronise (125)" in text


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_run_that_trained_nothing(count: int) -> None:
    died = [event("died", at, rank=0) for at in range(9)]
    text = " ".join(sentences(history_of(*[*records(0)][:count], *died)))
    assert "It trained nothing" in text
    assert text.count("rank 0 died") == 6
    assert "3 more are among the events." in text


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """Any figures of a window, of any number of ranks."""
    ranks = draw(st.integers(0, 4))
    seconds = st.floats(0.0, 1e5).map(lambda each: round(each, 6))  # as in the file
    times = st.lists(seconds, min_size=ranks, max_size=ranks)
    counts = st.lists(st.integers(0, 10_000), min_size=ranks, max_size=ranks)
    compute, data, moved = draw(times), draw(times), draw(times)
    return {
        "duration_s": draw(seconds),
        "rank_samples": draw(counts),
        "discarded_samples": draw(counts),
        "busy_s": [math.fsum(e) for e in zip(compute, data, moved, strict=True)],
        "data_wait_s": data,
        "transfer_s": moved,
        "sync_wait_s": draw(times),
        "device_samples_per_s": draw(times),
        "values": {"loss": draw(st.floats())},
    }


@given(st.lists(changes(), min_size=1, max_size=4))
def test_parts_add_up_and_every_number_is_one(found: list[dict[str, Any]]) -> None:
    history = history_of(*run_of(*found))
    whole = merged(history.windows)
    whole_time = time_parts(history, whole)
    assert [*whole_time] == [*PARTS]
    assert math.fsum(whole_time.values()) == pytest.approx(1.0)
    rows = [rank_row(whole, rank) for rank in range(len(whole["busy_s"]))]
    for row in rows:
        parts = [row[name] for name in PARTS if name != "other"]
        assert math.fsum(parts) == pytest.approx(1.0 if any(parts) else 0.0)
        assert all(0 <= part <= 1 for part in (*parts, *whole_time.values()))
    shares = math.fsum(row["share"] for row in rows)
    assert shares == pytest.approx(1.0 if sum(whole["rank_samples"]) else 0.0)
    text = " ".join(sentences(history))
    assert re.search(r"\b(nan|inf)\b", text) is None
