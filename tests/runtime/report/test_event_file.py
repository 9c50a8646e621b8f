"""The event file on disk: refused, continued, bounded; and of a run on its launcher."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from elche.coordination.protocol.events import Tick
from elche.errors import ConfigError
from elche.monitor.event_records import EventRecorder, Record
from elche.monitor.run_history import RunHistory
from elche.runtime.process.launch_config import LaunchConfig, LaunchResult
from elche.runtime.report import event_file
from elche.runtime.report.event_file import NAME, EventFile
from elche.runtime.report.run_watch import RunWatch
from tests.harness.printing import started
from tests.harness.waiting import until
from tests.monitor.test_run_history import begin, join, report


def window(number: int) -> Record:
    (record,) = EventRecorder().see(report(0), float(number))
    return record | {"samples": 100 * number}


def read(folder: Path) -> RunHistory:
    history = RunHistory()
    history.feed((folder / NAME).read_text())
    return history


def test_it_is_bounded_and_readers_see_another_file(tmp_path: Path) -> None:
    most_bytes = 20_000
    file = EventFile(tmp_path, most_bytes=most_bytes)
    first = (tmp_path / NAME).stat().st_ino
    for number in range(1000):
        file.add(window(number))
        until(file._lines.empty)
    file.close()
    assert (tmp_path / NAME).stat().st_size <= most_bytes
    assert (tmp_path / NAME).stat().st_ino != first
    history = read(tmp_path)
    assert sum(each["duration_s"] for each in history.windows) == 1000.0
    assert history.windows[-1] == window(999)
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]


def test_records_are_written_at_once(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    for number in range(3):
        file.add(window(number))
        until(lambda least=number: len(read(tmp_path).windows) > least)  # type: ignore
    file.close()


def test_a_stalled_disk_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "CLOSE_S", 0.05)
    file, stalled = EventFile(tmp_path), threading.Event()
    file._shrink = lambda: bool(stalled.wait(60))  # type: ignore
    file._most_bytes = 0
    for number in range(1000):
        file.add(window(number))
    file.close()
    stalled.set()
    until(lambda: len(read(tmp_path).windows) == 1000)


def test_a_folder_with_another_runs_events_is_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with_window(EventFile(tmp_path))
    before = path.read_text()
    with pytest.raises(ConfigError, match="a folder without events, got"):
        EventFile(tmp_path)
    assert path.read_text() == before
    path.write_text(before + '{"kind": "epo')  # the host crashed here
    with_window(EventFile(tmp_path, appends=True))
    assert read(tmp_path).windows == [window(0)] * 2
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a folder for events to write to, got"):
        EventFile(tmp_path / "file")


def with_window(file: EventFile) -> None:
    file.add(window(0))
    file.close()


@pytest.mark.parametrize("codes", [(1, 1), (0, 0)])
def test_a_folder_whose_run_has_trained_nothing_is_used(
    tmp_path: Path, codes: tuple[int, ...]
) -> None:
    start(tmp_path).close(LaunchResult(codes, "", (), None))
    if not any(codes):  # a run without windows, which has succeeded
        with pytest.raises(ConfigError, match="a folder without events, got"):
            start(tmp_path)
        return
    start(tmp_path).close(LaunchResult((0, 0), "", (), None))
    history = read(tmp_path)
    assert [run["attempt"] for run in history.runs] == [0, 1]


def test_a_restart_needs_no_event_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    watch = start(tmp_path / "file", appends_events=True)
    watch.see(join(0))
    watch.close(LaunchResult((0, 0), "", (), None))
    assert caplog.text.count("no more events are written to") == 1


def test_a_display_whose_reader_is_gone_ends_nothing(tmp_path: Path) -> None:
    def draw(history: RunHistory) -> None:
        raise BrokenPipeError

    watch = start(tmp_path, on_view=draw)
    watch.see(Tick())
    watch.close(LaunchResult((0, 0), "", (), None))


def test_a_full_disk_ends_the_file_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = EventFile(tmp_path)
    file._file.close()
    file._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    for number in range(3):
        file.add(window(number))
        until(lambda: not file._thread.is_alive())
    assert caplog.text.count("no more events are written to") == 1
    file.close()
    file._file.close()


def start(folder: Path, **options: Any) -> RunWatch:
    command = "python", "train.py"
    return RunWatch(
        LaunchConfig(command=command, num_ranks=2, events=folder, **options)
    )


def test_two_starts_of_a_run_in_one_file(tmp_path: Path) -> None:
    failed = LaunchResult((1, 143), "rank 0 failed", (), 0)
    policy = {"ELCHE_POLICY": "sync", "SECRET": "no"}
    drawn: list[RunHistory] = []
    watch = start(tmp_path, environment=policy, on_view=drawn.append)
    for message in (join(0), *begin(0), report(0), Tick()):
        watch.see(message)
    (seen,) = drawn
    assert seen.windows[-1]["samples"] == 100
    watch.close(failed)
    watch = start(tmp_path, appends_events=True)
    for message in (join(0), *begin(0), report(0)):
        watch.see(message)
    marks = watch.marks()
    watch.close(LaunchResult((0, 0), "", (), None))
    history = read(tmp_path)
    first, second = history.runs
    assert first["settings"] == {"ELCHE_POLICY": "sync"}
    assert (first["policy"], first["world_size"]) == ("sync", 2)
    assert first["command"] == ["python", "train.py"]
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert history.windows[-1]["samples"] == 100  # of the same epoch, trained again
    assert [each["text"] for each in history.events] == ["start 2 of the run"]
    assert [mark.name for mark in marks] == ["restart"]
    assert history.end is not None
    assert history.end["exit_codes"] == [0, 0]
    assert "SECRET" not in json.dumps(history.records)


SCRIPT = Path(__file__).parents[1] / "process" / "cases" / "endless.py"


@pytest.mark.distributed
def test_checkpoints_are_events(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = f"--nproc 2 --events {tmp_path} --checkpoint-dir {saved}"
    words = f"elche run --quiet {options} --checkpoint-every 0.5 {SCRIPT} sync"

    def texts(name: str) -> list[str]:
        events = read(tmp_path).events if (tmp_path / NAME).exists() else []
        return [each["text"] for each in events if each["name"] == name]

    with started(tmp_path, [sys.executable, "-m", *words.split()]) as (run,):
        until(lambda: len(texts("checkpoint")) > 1, poll_s=0.2)
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(100)
    found, last = texts("checkpoint"), max(saved.glob("checkpoint-*")).name
    assert len({*found}) == len(found)
    assert found[-1].startswith(f"saved/{last}: epoch ")
    assert not texts("error")  # the stop was asked for


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_a_throttled_rank_is_an_event(tmp_path: Path) -> None:
    script, slow = Path(__file__).parent / "cases" / "slowed.py", tmp_path / "slow"
    words = f"elche run --quiet --nproc 2 --events {tmp_path} {script} {slow}"

    def history() -> RunHistory:
        return read(tmp_path) if (tmp_path / NAME).exists() else RunHistory()

    def is_said(name: str) -> bool:
        return any((e["name"], e["rank"]) == (name, 1) for e in history().events)

    with started(tmp_path, [sys.executable, "-m", *words.split()]) as (run,):
        until(lambda: sum(w["duration_s"] for w in history().windows) > 10, poll_s=0.2)
        assert not is_said("slower")
        slow.touch()
        until(lambda: is_said("slower"), poll_s=0.2)
        slow.unlink()
        until(lambda: is_said("faster"), poll_s=0.2)
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(100)
