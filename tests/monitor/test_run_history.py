"""The event file's records: what makes them, what reads them, what merges them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.accounts.metrics import WindowMetrics
from elche.coordination.protocol.events import (
    CheckpointSaved,
    Failed,
    Join,
    Left,
    RankLost,
)
from elche.coordination.protocol.instructions import (
    Abort,
    BeginEpoch,
    EndEpoch,
    LeaveOut,
    MetricsReported,
    PolicyChosen,
)
from elche.errors import ConfigError
from elche.monitor.event_records import (
    FORMAT,
    VERSION,
    EventRecorder,
    Record,
    coarser,
    event_record,
    merged,
)
from elche.monitor.run_history import RunHistory, columns, rank_row, run_row, thinned

FILE = json.dumps({"kind": "file", "format": FORMAT, "version": VERSION}) + "\n"


SETTINGS = (("config.policy", '"sync"'), ("epochs", "3"))


def join(rank: int, settings: Any = SETTINGS) -> Join:
    return Join(
        rank=rank,
        version=0,
        world_size=2,
        settings=settings,
        tensors=(),
        device=f"device {rank}",
        horizon_batches=1,
        memory_bytes=1 << 30,
    )


def begin(epoch: int, samples: int = 1000) -> list[BeginEpoch]:
    """The instruction to each of two ranks."""
    sizes, policy = ((10, samples // 10),), "sync"
    return [
        BeginEpoch(
            rank=r, epoch=epoch, sizes=sizes, policy=policy, window=0, cut=(1, 0, 1)
        )
        for r in range(2)
    ]


def end(epoch: int, left: Any = ()) -> list[EndEpoch]:
    return [
        EndEpoch(
            rank=r, epoch=epoch, samples=0, sync_s=0.0, windows=1, anchor=1, left=left
        )
        for r in range(2)
    ]


def report(
    epoch: int, samples: tuple[int, ...] = (80, 20), **changes: Any
) -> MetricsReported:
    zeros = tuple(0.0 for _ in samples)
    values: dict[str, Any] = {
        "window": 0,
        "epoch": epoch,
        "synchronisations": 1,
        "duration_s": 1.0,
        "rank_samples": samples,
        "discarded_samples": tuple(0 for _ in samples),
        "busy_s": tuple(0.5 for _ in samples),
        "data_wait_s": tuple(0.125 for _ in samples),
        "transfer_s": zeros,
        "sync_wait_s": tuple(0.5 for _ in samples),
        "means": (("loss", 2.0),),
        **changes,
    }
    text = WindowMetrics(**values).to_json()
    return MetricsReported(rank=0, epoch=epoch, window=0, values=text)


def recorded(*messages: Any, recorder: EventRecorder | None = None) -> list[Record]:
    recorder = recorder or EventRecorder()
    return [r for at, message in enumerate(messages) for r in recorder.see(message, at)]


def names(records: Sequence[Record]) -> list[tuple[str, int | None]]:
    return [(r["name"], r["rank"]) for r in records if r["kind"] == "event"]


def test_an_epoch_of_two_ranks_as_records() -> None:
    epoch = *begin(0), report(0), report(0), *end(0)
    records = recorded(join(0), join(1), *epoch, *begin(1), report(1))
    kinds = ["rank"] * 2 + ["epoch"] + ["window"] * 2 + ["epoch_end", "epoch", "window"]
    assert [each["kind"] for each in records] == kinds
    rank, other, opened, _, window, *_, last = records
    assert rank["memory_bytes"] == 1 << 30
    assert rank["settings"] == {"config.policy": "sync", "epochs": 3}
    assert "settings" not in other
    assert (opened["samples"], opened["epochs"]) == (1000, 3)
    assert (window["samples"], window["epoch_samples"]) == (200, 200)
    assert (last["samples"], last["epoch_samples"]) == (300, 100)
    assert window["device_samples_per_s"] == [160.0, 40.0]
    assert window["values"] == {"loss": 2.0}


def test_what_happens_to_ranks_is_recorded_once() -> None:
    out = [LeaveOut(rank=r, epoch=0, left_out=(1,), reason="slow") for r in range(2)]
    back = [LeaveOut(rank=r, epoch=0, left_out=()) for r in range(2)]
    failed = Failed(rank=1, error="ValueError: no\nmore", traceback="")
    records = recorded(
        *(join(0), join(1), *begin(0), *out, *end(0), *begin(1), *back),
        *(report(1), report(1), report(1)),
        PolicyChosen(rank=0, policy="sync", reason="it is faster"),
        *(CheckpointSaved(rank=0, text="saved/1: epoch 0"), failed, RankLost(rank=1)),
        *(join(1), Left(rank=1), RankLost(rank=1)),
        *(Abort(rank=0, reason="lost", failed_rank=0), Abort(rank=1, reason="lost")),
        RankLost(rank=0),
    )
    assert names(records) == [
        *(("excluded", 1), ("returned", 1), ("policy", 0), ("checkpoint", None)),
        *(("died", 1), ("joined", 1), ("left", 1), ("error", 0)),
    ]
    texts = {r["name"]: r["text"] for r in records if r["kind"] == "event"}
    assert texts["excluded"] == "slow"
    assert texts["checkpoint"] == "saved/1: epoch 0"
    assert texts["died"] == "failed: ValueError: no"


def test_only_real_exclusions_and_returns_are_recorded() -> None:
    """An excluded rank takes part in each epoch's first step."""
    out = [LeaveOut(rank=r, epoch=0, left_out=(1,), reason="slow") for r in range(2)]
    all_in, first = (
        [LeaveOut(rank=r, epoch=0, left_out=()) for r in range(2)],
        report(0),
    )
    alone = report(0, (80, 0))
    stays = *begin(0), *all_in, first, *out, alone, alone, *end(0)
    messages = join(0), join(1), first, *out, alone, *stays, *stays
    assert names(recorded(*messages)) == [("excluded", 1)]
    again = *begin(0), *all_in, first, first, first, *out
    changes = ["excluded", "returned", "excluded"]
    assert names(recorded(*messages, *again)) == [(name, 1) for name in changes]
    said = LeaveOut(rank=0, epoch=0, left_out=(), reason="rank 1 takes part again")
    records = recorded(*messages, *all_in, first, said, first, first)
    assert names(records) == [("excluded", 1), ("returned", 1)]
    assert records[-3]["text"] == "rank 1 takes part again"


def test_an_excluded_rank_that_dies_does_not_return() -> None:
    out, back = (LeaveOut(rank=0, epoch=0, left_out=ranks) for ranks in ((1,), ()))
    records = recorded(join(0), join(1), *begin(0), out, RankLost(rank=1), back)
    assert names(records) == [("excluded", 1), ("died", 1)]


def test_the_rest_of_a_cut_epoch_continues_its_samples() -> None:
    cut = *begin(0), report(0), *end(0, left=((100, 1000),)), *begin(0, 900)
    records = recorded(*cut, report(0))
    first, _, rest, window = records
    assert (first["samples"], rest["samples"], rest["done"]) == (1000, 1000, 100)
    assert (window["samples"], window["epoch_samples"]) == (200, 200)


def test_a_restart_counts_from_its_epochs_begin() -> None:
    history = RunHistory()
    for record in recorded(*begin(0), report(0), *end(0), *begin(1), report(1)):
        history.take(record)
    assert history.epoch_starts == {0: 0, 1: 100, 2: 200}
    recorder = EventRecorder(history.epoch_starts)
    again = recorded(*begin(1), report(1), report(1), *end(1), recorder=recorder)
    assert [each["samples"] for each in again if "samples" in each] == [1000, 200, 300]
    (_, last) = recorded(*begin(2), report(2), recorder=recorder)
    assert last["samples"] == 400
    assert history.epoch_sizes == {0: 1000, 1: 1000}
    inside = EventRecorder(history.epoch_starts, history.epoch_sizes)
    opened, window = recorded(*begin(1, 600), report(1), recorder=inside)
    assert (opened["samples"], opened["done"]) == (1000, 400)
    assert (window["samples"], window["epoch_samples"]) == (600, 500)


def test_a_file_is_read_in_any_pieces() -> None:
    records = recorded(join(0), *begin(0), report(0), *end(0))
    text = FILE + "".join(json.dumps(r) + "\n" for r in records)
    text += '{"kind": "unheard", "t": 1}\n{"kind": "epo\n{"kind": "end", "exit'
    whole, pieces = RunHistory(), RunHistory()
    assert whole.feed(text) == 6
    assert sum(pieces.feed(character) for character in text) == 6
    assert whole.records == pieces.records == [json.loads(FILE), *records]
    assert whole.end is None
    whole.feed('_codes": [0]}\n')
    assert whole.end == {"kind": "end", "exit_codes": [0]}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (FILE.replace("1}", "2}"), "of version 1, got 2: read the file with the newer"),
        (FILE.replace(FORMAT, "else"), "expected elche events, got"),
        ("epoch,loss\n1,2\n", "expected elche events, got 'epoch,loss'"),
    ],
)
def test_what_is_no_event_file_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        RunHistory().feed(text)


def test_columns() -> None:
    history = RunHistory()
    for record in recorded(*begin(0), report(0), report(0, means=())):
        history.take(record)
    assert history.scalar_names == ["loss"]
    assert columns([]) == {}
    run = columns(map(run_row, history.windows))
    assert run["samples_per_s"] == [100.0, 100.0]
    assert run["device_samples_per_s"] == [200.0, 200.0]
    assert run["efficiency"] == [0.5, 0.5]
    row = rank_row(history.windows[0], 0)
    parts = [row[name] for name in ("compute", "data_wait", "transfer", "sync_wait")]
    assert parts == [0.375, 0.125, 0.0, 0.5]
    assert (row["busy"], row["share"], row["reduction_s"]) == (0.5, 0.8, 0.5)
    assert set(rank_row(history.windows[0], 7).values()) == {0.0, 2, 100}


def test_a_dead_ranks_speed_counts_as_long_as_its_samples() -> None:
    alone = report(0, (80,), busy_s=(1.0,), data_wait_s=(0.0,), sync_wait_s=(0.0,))
    both = report(0, busy_s=(1.0, 1.0))
    history = RunHistory()
    joined, lost = (join(0), join(1)), RankLost(rank=1)
    for record in recorded(*joined, *begin(0), both, both, lost, both, alone):
        history.take(record)
    speeds = [each["device_samples_per_s"] for each in history.windows]
    assert speeds == [[80.0, 20.0]] * 3 + [[80.0]]  # the last samples come late
    recent = history.recent()
    assert recent is not None
    assert rank_row(recent, 1)["samples_per_s"] == 20.0
    assert run_row(recent)["efficiency"] == pytest.approx(1.0)


WINDOWS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0.0, 9.0)), min_size=1
)


@given(WINDOWS, st.integers(1, 9))
def test_merging_keeps_sums_and_weighted_means(
    work: list[tuple[int, int, float]], most: int
) -> None:
    windows = recorded(
        *(report(0, (a, b), means=(("loss", x),), duration_s=x) for a, b, x in work)
    )
    total = sum(a + b for a, b, _ in work)
    for found in ([merged(windows)], thinned(windows, most), coarser(windows)):
        assert sum(sum(each["rank_samples"]) for each in found) == total
        length_s = math.fsum(each["duration_s"] for each in found)
        assert length_s == pytest.approx(math.fsum(x for *_, x in work), abs=1e-5)
        assert found[-1]["samples"] == total
    assert len(thinned(windows, most)) <= most
    if total:
        mean = math.fsum((a + b) * x for a, b, x in work) / total
        assert merged(windows)["values"]["loss"] == pytest.approx(mean, abs=1e-6)


def test_a_history_is_bounded_and_coarser_with_age() -> None:
    history, recorder = RunHistory(most_windows=64), EventRecorder()
    died = event_record("died", "gone", 1)
    for number in range(5000):
        for record in recorder.see(report(0, (1, 0)), number):
            history.take(record)
        if number == 2500:
            history.take({"t": 2500, **died})
    durations = [each["duration_s"] for each in history.windows]
    assert len(durations) <= 64
    assert history.revision > 10
    assert sum(durations) == 5000
    assert durations == sorted(durations, reverse=True)
    assert durations[-1] == 1.0
    times = [each["t"] for each in history.records]
    assert times == sorted(times)
    assert [each["name"] for each in history.events] == ["died"]


def test_old_events_are_dropped_before_newer_ones() -> None:
    events = [{"t": t, **event_record("policy", str(t))} for t in range(9)]
    kept = coarser([{"kind": "run"}, *events], others=4)
    assert [each.get("t") for each in kept] == [None, 5, 6, 7, 8]
