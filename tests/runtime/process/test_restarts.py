"""When a run is started anew, with what, and when it is not."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elche.checkpoint.store import CheckpointStore
from elche.cli.main import main
from elche.errors import ConfigError
from elche.monitor.run_history import RunHistory
from elche.runtime.process import restarts
from elche.runtime.process.launch_config import (
    LaunchConfig,
    LaunchResult,
    python_command,
)
from elche.runtime.process.restarts import RestartConfig, launch_with_restarts

KILLED = LaunchResult((1, 137), "rank 1 is gone: x", (), 1, failed_s=0.0)
RAISED = LaunchResult(
    (1, 1), "rank 0 failed: ValueError: bad\n...", (), 0, failed_s=0.0
)
ENDED = LaunchResult((0, 0), "", (), None)


class Starts:
    """In place of `launch`: ends as it is told, and may leave a checkpoint."""

    def __init__(self, results: Sequence[LaunchResult], folder: Path | None) -> None:
        self._results = iter(results)
        self._folder = folder
        self.saves = True
        self.seen: list[LaunchConfig] = []

    def __call__(self, config: LaunchConfig, on_ready: Any) -> LaunchResult:
        self.seen.append(config)
        if self._folder is not None and self.saves:
            path = self._folder / CheckpointStore(self._folder).next_name()
            path.mkdir(parents=True)
            (path / "manifest.json").touch()
        return next(self._results)


def restarted(
    monkeypatch: pytest.MonkeyPatch,
    results: Sequence[LaunchResult],
    *,
    saves: bool = True,
    devices: tuple[str, ...] | None = None,
    **options: Any,
) -> tuple[Starts, list[str], LaunchResult]:
    """A run whose starts end so."""
    starts = Starts(results, options.get("checkpoint_dir"))
    starts.saves = saves
    monkeypatch.setattr(restarts, "launch", starts)
    lines: list[str] = []
    ranks: dict[str, Any] = {"devices": devices} if devices else {"num_ranks": 2}
    config = LaunchConfig(command=("x",), **ranks)
    result = launch_with_restarts(config, RestartConfig(**options), lines.append)
    return starts, lines, result


def test_restarts_resume_from_the_newest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts, lines, result = restarted(
        monkeypatch,
        [KILLED, RAISED, ENDED],
        checkpoint_dir=tmp_path,
        every_s=2.5,
        keep=3,
        max_restarts=5,
    )
    assert result is ENDED
    told = {
        "ELCHE_CHECKPOINT_DIR": str(tmp_path),
        "ELCHE_CHECKPOINT_EVERY_S": "2.5",
        "ELCHE_CHECKPOINT_KEEP": "3",
    }
    again = {**told, "ELCHE_RESUME": str(tmp_path)}
    assert [start.environment for start in starts.seen] == [told, again, again]
    assert [start.appends_events for start in starts.seen] == [False, True, True]
    assert "rank 1 was killed by SIGKILL" in lines[0]
    assert "anew from checkpoint-00000001, restarts left: 4" in lines[0]
    assert "rank 0 ended with code 1 (rank 0 failed: ValueError: bad)" in lines[1]
    assert "from checkpoint-00000002, restarts left: 3" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_deaths_by_signal_come_again_until_restarts_are_used_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, max_restarts: int
) -> None:
    options = {"checkpoint_dir": tmp_path, "max_restarts": max_restarts}
    starts, _, result = restarted(monkeypatch, [KILLED] * 9, saves=False, **options)
    assert len(starts.seen) == max_restarts + 1
    assert result.exit_code == 137


@pytest.mark.parametrize(
    "ends",
    [ENDED, LaunchResult((143, 143), "x", (), 0, signal=signal.SIGTERM)],
    ids=["clean", "signal"],
)
def test_no_restart_after(monkeypatch: pytest.MonkeyPatch, ends: LaunchResult) -> None:
    starts, lines, result = restarted(monkeypatch, [ends], max_restarts=3)
    assert result is ends
    assert len(starts.seen) == 1
    assert not lines


@pytest.mark.parametrize("with_folder", [True, False])
def test_no_restart_after_the_same_error_without_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_folder: bool
) -> None:
    options = {"checkpoint_dir": tmp_path} if with_folder else {}
    starts, lines, result = restarted(
        monkeypatch, [KILLED, RAISED, RAISED], saves=False, max_restarts=9, **options
    )
    assert len(starts.seen) == 3
    assert result.exit_code == 1
    assert lines[-1] == (
        "no restart: rank 0 ended with code 1 (rank 0 failed: ValueError: bad), twice, "
        "and no progress in between"
    )


def test_reports_of_earlier_starts_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    story, trace = tmp_path / "story.txt", tmp_path / "trace.json"
    results = iter([KILLED, KILLED, ENDED])

    def launch(config: LaunchConfig, on_ready: Any) -> LaunchResult:
        story.write_text("a start")
        trace.write_text("a start")
        return next(results)

    monkeypatch.setattr(restarts, "launch", launch)
    config = LaunchConfig(
        command=("x",), num_ranks=2, story_path=story, trace_path=trace
    )
    launch_with_restarts(config, RestartConfig(max_restarts=3), lambda line: None)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        f"{name}{start}"
        for name in ("story.txt", "trace.json")
        for start in ("", ".0", ".1")
    ]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_restarts": -1}, "--max-restarts to be an int >= 0, got -1"),
        ({"keep": 0}, "--keep to be an int >= 1, got 0"),
        (
            {"every_s": 0.0, "checkpoint_dir": Path()},
            "to be a positive finite number, got 0.0",
        ),
        ({"every_s": 1.0}, "need a --checkpoint-dir"),
        ({"resume": True}, "need a --checkpoint-dir"),
    ],
)
def test_wrong_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        RestartConfig(**options)


def test_the_folder_of_another_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    restarted(monkeypatch, [ENDED], checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"of another run; continue"):
        restarted(monkeypatch, [ENDED], checkpoint_dir=tmp_path)
    starts, _, _ = restarted(monkeypatch, [ENDED], checkpoint_dir=tmp_path, resume=True)
    assert "ELCHE_RESUME" in starts.seen[0].environment
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="that can be made"):
        restarted(monkeypatch, [ENDED], checkpoint_dir=tmp_path / "file" / "below")


DIES = """
import os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
rank = os.environ["RANK"]
starts = len(list(folder.glob(f"{rank}.*")))
(folder / f"{rank}.{starts}").write_text(os.environ["ELCHE_COORDINATOR"])
if starts < 2:
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


@pytest.mark.distributed
def test_processes_are_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain script: rank 1 dies twice, and rank 0, which only waits, is ended."""
    monkeypatch.setattr("elche.runtime.process.rank_processes.GRACE_S", 0.5)
    script = tmp_path / "script.py"
    script.write_text(DIES)
    lines: list[str] = []
    command, events = python_command(str(script), str(tmp_path)), tmp_path / "events"
    result = launch_with_restarts(
        LaunchConfig(command=command, num_ranks=2, events=events),
        RestartConfig(max_restarts=2),
        lines.append,
    )
    history = RunHistory()
    history.feed((events / "events.jsonl").read_text())
    assert [run["attempt"] for run in history.runs] == [0, 1, 2]
    assert history.end is not None
    assert history.end["exit_codes"] == [0, 0]
    assert result.exit_code == 0
    assert [line.split(",")[0] for line in lines] == [
        "rank 1 was killed by SIGKILL"
    ] * 2
    assert len(list(tmp_path.glob("0.*"))) == 3
    assert len(list(tmp_path.glob("1.*"))) == 3
    assert len({path.read_text() for path in tmp_path.glob("1.*")}) == 3  # ports


def test_options_of_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts = Starts([KILLED, ENDED], tmp_path / "c")
    monkeypatch.setattr(restarts, "launch", starts)
    script = tmp_path / "script.py"
    script.touch()
    words = f"run --nproc 2 --checkpoint-dir {tmp_path}/c --checkpoint-every 30"
    options = f"{words} --keep 4 --max-restarts 2 --events e {script} --resume"
    result = CliRunner().invoke(main, options.split())
    assert result.exit_code == 0, result.output
    assert "elche run: rank 1 was killed by SIGKILL" in result.output
    assert starts.seen[0].command[-1] == "--resume"  # the script's own
    assert starts.seen[0].events == Path("e")
    assert not starts.seen[0].appends_events
    assert starts.seen[0].on_view is not None  # standard error is no terminal
    assert starts.seen[1].environment["ELCHE_CHECKPOINT_EVERY_S"] == "30.0"
