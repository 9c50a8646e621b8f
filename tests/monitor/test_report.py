"""A run in words: its figures are true and finite, whatever its file has."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.monitor.report import PARTS, sentences, time_parts, whole_run
from elche.monitor.run_history import RunHistory, rank_row

START_S = 1_800_000_000.0


def history_of(*records: dict[str, Any]) -> RunHistory:
    """A history with a header and these records, a second apart."""
    history = RunHistory()
    header = {"kind": "file", "format": "elche events", "version": 1}
    for at, record in enumerate((header, *records)):
        history.feed(json.dumps({"t": START_S + at, **record}) + "\n")
    return history


RUN = {
    "kind": "run",
    "command": ["python", "train me.py"],
    "policy": "auto",
    "world_size": 2,
    "host": "box",
}
RANKS = [{"kind": "rank", "rank": rank, "device": "CPU"} for rank in (0, 1)]
EPOCH = {"kind": "epoch", "epoch": 0, "policy": "sync", "samples": 800, "epochs": 2}


def window(samples: list[int], /, **fields: Any) -> dict[str, Any]:
    """A window of one second, in which ranks compute for half of it."""
    none = [0.0] * len(samples)
    return {
        "kind": "window",
        "epoch": 0,
        "samples": sum(samples),
        "epoch_samples": sum(samples),
        "duration_s": 1.0,
        "synchronisations": 1,
        "rank_samples": samples,
        "discarded_samples": [0] * len(samples),
        "busy_s": [0.5] * len(samples),
        "data_wait_s": none,
        "transfer_s": none,
        "sync_wait_s": [0.5] * len(samples),
        "device_samples_per_s": [2.0 * each for each in samples],
        "values": {},
        **fields,
    }


def test_a_run_in_words() -> None:
    died = {"kind": "event", "name": "died", "rank": 1, "text": "silent for 4 s"}
    history = history_of(
        RUN,
        *RANKS,
        EPOCH,
        window([300, 100], values={"loss": 2.0}, discarded_samples=[0, 8]),
        window([300, 100], samples=800, values={"loss": 1.25}),
        died,
        {"kind": "end", "exit_codes": [0, 137], "reason": "rank 1 was killed"},
    )
    assert sentences(history) == [
        "python 'train me.py' ran on box, policy auto, then sync, devices 2 x CPU.",
        "It trained 400 samples/s: 50% of what its devices deliver while they do not "
        "synchronise (800), and 0.67 times what the fastest one delivers (rank 0, 600)."
        " No device was run alone for these figures.",
        "It trained 800 samples in 0:00:02, epochs begun: 1.",
        "loss went from 2 to 1.25.",
        "The ranks' time: 50.0% computing, 0.0% waiting for data, 0.0% transfer to "
        "devices, 50.0% waiting for other ranks and reducing, 0.0% other (the loop's "
        "own work, starts of epochs).",
        "8 samples were trained and discarded.",
        "At 0:00:07 rank 1 died: silent for 4 s.",
        "It ended after 0:00:08 with exit codes 137 of rank 1: rank 1 was killed.",
    ]


def test_time_outside_of_batches_is_named() -> None:
    """Of two ranks one reports half of a window, the other one nothing."""
    slow = window([300, 100], busy_s=[0.25, 0.0], sync_wait_s=[0.25, 0.0])
    history = history_of(RUN, *RANKS, EPOCH, slow)
    parts = time_parts(history, whole_run(history))
    assert parts["other"] == pytest.approx(0.5)
    assert parts["compute"] == pytest.approx(0.25)


def test_samples_of_a_restart_count_once() -> None:
    history = history_of(
        RUN, *RANKS, EPOCH, window([300, 100]), RUN, window([150, 50], samples=500)
    )
    text = " ".join(sentences(history))
    assert "trained 500 samples in" in text
    assert "100 samples were trained again after restarts." in text
    assert "no end" in text
    assert "started 2 times" in text


def test_devices_count_while_they_were_there() -> None:
    """A rank that died halfway lowers what the devices deliver from then on."""
    alone = window([400, 0], device_samples_per_s=[800, 0], busy_s=[0.5, 0.0])
    history = history_of(RUN, *RANKS, EPOCH, window([400, 400]), alone)
    assert "50% of what its devices" in " ".join(sentences(history))
    assert "synchronise (1,200)" in " ".join(sentences(history))


@pytest.mark.parametrize("records", [[], RANKS, [*RANKS, EPOCH], [EPOCH, window([])]])
def test_a_run_that_trained_nothing(records: list[dict[str, Any]]) -> None:
    text = " ".join(sentences(history_of(RUN, *records)))
    assert re.search(r"\b(nan|inf)\b", text) is None
    assert "It trained" in text


def test_a_long_list_is_cut() -> None:
    died = {"kind": "event", "name": "died", "rank": 0, "text": "its process is gone"}
    text = " ".join(sentences(history_of(RUN, *RANKS, EPOCH, *[died] * 9)))
    assert text.count("rank 0 died") == 6
    assert "3 more are among the events." in text


numbers = st.integers(0, 10_000)
seconds = st.floats(0.0, 1e5).map(lambda each: round(each, 6))  # as in the file


@st.composite
def windows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Up to four windows of any ranks; their number may grow."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        ranks = draw(st.integers(1, 4))
        compute, data, moved, wait = (
            draw(st.lists(seconds, min_size=ranks, max_size=ranks)) for _ in range(4)
        )
        counts = st.lists(numbers, min_size=ranks, max_size=ranks)
        times = zip(compute, data, moved, strict=True)
        fields = {
            "duration_s": draw(seconds),
            "discarded_samples": draw(counts),
            "busy_s": [math.fsum(each) for each in times],
            "data_wait_s": data,
            "transfer_s": moved,
            "sync_wait_s": wait,
            "values": {"loss": draw(st.floats(allow_nan=True))},
        }
        found.append(window(draw(counts), **fields))
    return found


@given(windows())
def test_parts_add_up_and_every_number_is_one(found: list[dict[str, Any]]) -> None:
    history = history_of(RUN, EPOCH, *found)
    whole = whole_run(history)
    rows = [rank_row(whole, rank) for rank in range(len(whole["busy_s"]))]
    text = " ".join(sentences(history))
    whole_time = time_parts(history, whole)
    assert [*whole_time] == [*PARTS]
    assert math.fsum(whole_time.values()) == pytest.approx(1.0)
    assert all(-1e-9 <= part <= 1 + 1e-9 for part in whole_time.values())
    for row in rows:
        parts = [row[name] for name in PARTS if name != "other"]
        assert all(0 <= part <= 1 for part in parts)
        assert math.fsum(parts) == pytest.approx(1.0 if any(parts) else 0.0)
    shares = math.fsum(row["share"] for row in rows)
    assert shares == pytest.approx(1.0 if sum(whole["rank_samples"]) else 0.0)
    assert re.search(r"\b(nan|inf)\b", text) is None
