"""What a rank did as spans, and the timeline of a run in one file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import elche
from elche.errors import ConfigError
from elche.monitor.trace import BATCH, DATA_WAIT, SYNC, Span
from elche.runtime.report import timeline as timeline_module
from elche.runtime.report.timeline import TRACE, Timeline, join_parts, write_part
from elche.session.process import process


def timeline(rank: int, batches: int = 3) -> Timeline:
    own = Timeline(rank)
    for number in range(batches):
        own.record(("step", number, number, number + 0.25, number + 1.0, 8, 0.125))
    own.add("sync 0", SYNC, batches, batches + 0.5)
    return own


def spans_of(path: Path) -> list[tuple[int, str, float]]:
    trace: dict[str, Any] = json.loads(path.read_text())
    return [
        (each["pid"], each["name"], each["ts"] / 1e6)
        for each in trace["traceEvents"]
        if each["ph"] == "X"
    ]


def leave(folder: Path, monkeypatch: pytest.MonkeyPatch, *ranks: int) -> None:
    monkeypatch.setenv(TRACE, str(folder))
    for rank in ranks:
        write_part(timeline(rank))


def test_ranks_are_joined_on_one_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, monkeypatch, 1, 0)
    path = tmp_path / "trace.json"
    join_parts(tmp_path, path, {0: "rank 0: CPU", 1: "rank 1"}, {"exit codes": [0, 0]})
    spans = spans_of(path)
    for rank in (0, 1):
        own = [(name, at_s) for of, name, at_s in spans if of == rank]
        assert ("step 2", 2.25) in own
        assert ("sync 0", 3.0) in own
    trace = json.loads(path.read_text())
    assert trace["otherData"] == {"exit codes": [0, 0]}
    assert '"name": "rank 0: CPU"' in path.read_text()
    waits = [each["args"].get("waiting for ranks, ms") for each in trace["traceEvents"]]
    assert waits.count(125.0) == 6


def test_a_rank_that_was_killed_is_named_and_a_torn_line_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, monkeypatch, 0, 1)
    part = tmp_path / "spans-1.jsonl"
    part.write_text(part.read_text()[:-20])
    path = tmp_path / "trace.json"
    join_parts(tmp_path, path, {0: "a", 1: "b", 2: "c"}, {})
    names = {rank: [n for of, n, _ in spans_of(path) if of == rank] for rank in (0, 1)}
    assert "sync 0" in names[0]
    assert names[1] == [name for name in names[0] if name != "sync 0"]
    assert json.loads(path.read_text())["otherData"] == {
        "ranks without a timeline": [2]
    }
    assert "nothing of ranks [2]" in caplog.text


def test_what_cannot_be_written_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_folder = tmp_path / "a file"
    no_folder.touch()
    with caplog.at_level(logging.WARNING):
        leave(no_folder, monkeypatch, 0)
        join_parts(tmp_path, no_folder / "trace.json", {}, {})
    assert caplog.text.count("cannot write the timeline to") == 2


def test_a_rank_writes_its_own_timeline_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "timeline", timeline(1))
    spans = elche.timeline(tmp_path / "own.json")
    assert len(spans) == 7
    assert len(spans_of(tmp_path / "own.json")) == 7
    with pytest.raises(ConfigError, match="cannot write"):
        elche.timeline(tmp_path / "no folder" / "own.json")
    monkeypatch.setattr(process, "timeline", None)
    with pytest.raises(ConfigError, match=r"elche.timeline\(\) needs a run"):
        elche.timeline()


def test_a_batch_is_a_wait_for_data_and_what_followed() -> None:
    own = Timeline(2)
    own.record(("step", 7, 1.0, 1.25, 3.0, 16, 0.0))
    own.add("sync 3", SYNC, 3.0, 3.5)
    assert own.newest() == [
        Span(2, DATA_WAIT, DATA_WAIT, 1.0, 0.25),
        Span(2, "step 7", BATCH, 1.25, 1.75, {"samples": 16}),
        Span(2, "sync 3", SYNC, 3.0, 0.5),
    ]
    assert own.newest() == own.newest()  # reading takes nothing away


def test_only_the_newest_records_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MOST_RECORDS", 2)
    own = Timeline(0)
    for number in range(3):
        own.record(("batch", number, 0.0, 0.0, 1.0, 1, 0.0))
    names = [span.name for span in own.newest() if span.category == BATCH]
    assert names == ["batch 1", "batch 2"]
