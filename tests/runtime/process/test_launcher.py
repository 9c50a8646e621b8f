"""What `elche run` gives its ranks, what it does with signals, and its exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elche.comm.transport import torch_store
from elche.runtime.process import rank_processes
from elche.runtime.process.launch import LaunchedRun, launch
from elche.runtime.process.launch_config import (
    LaunchConfig,
    LaunchResult,
    python_command,
)
from elche.runtime.process.launcher_watch import process_state
from tests.harness import printing
from tests.harness.printing import Printing
from tests.harness.waiting import is_running, until

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent / "cases"
RANKS = str(HERE / "launcher_ranks.py")
TRAINING = str(HERE / "scripts.py")
# Whoever ends has been told, or killed by the second signal: nobody is ended for time.
PATIENT = (
    "from elche.runtime.process import rank_processes as r; "
    "r.GRACE_S = r.HEED_S = r.OWN_END_S = r.KILL_AFTER_S = 1e4; "
    "from elche.cli.main import main; main()"
)

ELCHE = ("-m", "elche")


@contextmanager
def started(
    tmp_path: Path,
    *arguments: str,
    entry: tuple[str, ...] = ("-c", PATIENT),
    command: tuple[str, ...] = ("run",),
) -> Iterator[Printing]:
    """Starts `elche run`; what is left of it at the end, the leak check will say."""
    program = [sys.executable, *entry, *command, *arguments]
    with printing.started(tmp_path, program) as [run]:
        yield run


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal."""
    return process_state(pid) == "T"


def _is_gone(pid: int) -> bool:
    return process_state(pid) in ("", "Z", "X")


def launched(*arguments: str) -> tuple[LaunchResult, list[tuple[int, str]]]:
    """A run of two ranks from this process, and their lines."""
    lines: list[tuple[int, str]] = []
    result = launch(
        LaunchConfig(
            command=python_command(*arguments),
            num_ranks=2,
            on_line=lambda rank, line: lines.append((rank, line)),
        )
    )
    return result, lines


def test_what_ranks_leave_behind_delays_no_end_and_loses_no_line() -> None:
    leave = "import subprocess, sys; left = subprocess.Popen(['sleep', '100'])"
    result, lines = launched("-c", f"{leave}; sys.stdout.write(f'{{left.pid}}\\ntail')")
    left = [int(line) for _, line in lines if line != "tail"]
    try:
        assert all(map(is_running, left))
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert result.exit_codes == (0, 0)
    assert sorted(rank for rank, line in lines if line == "tail") == [0, 1]


SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)


@SIGNALS
@pytest.mark.every(2)
def test_a_signal_to_the_launcher_alone_is_told_to_ranks_that_train(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    # Once: the ranks trained on for 10 s and were ended without a word, of code 130.
    with started(tmp_path, "--nproc", "2", TRAINING, "endless") as run:
        run.wait_for(r"rank \d is process", 2)
        run.wait_until_idle()  # it knows of them
        run.process.send_signal(number)
        assert run.end() == code
        reason = f"interrupted: the launcher received {number.name}"
        assert f"ended with codes [1, 1]: {reason}" in run.output
        # From each rank too, at one time; each traceback stays together.
        whole = r"Traceback \(most recent call last\):\n(?:  .*\n)+elche\.errors\.\w+: "
        assert len(re.findall(whole + reason, run.output)) == 2, run.output


@SIGNALS
def test_ranks_that_do_not_hear_the_coordinator_get_the_signal(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with started(tmp_path, "--nproc", "2", RANKS, "apart", str(tmp_path)) as run:
        run.wait_for("is ready", 2)
        run.process.send_signal(number)
        assert run.end() == code
        assert f"codes [{code} ({number.name}), {code} ({number.name})]" in run.output


@SIGNALS
def test_the_second_signal_kills(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    # Once: it was ignored.
    with started(tmp_path, "--nproc", "2", RANKS, "deaf", str(tmp_path)) as run:
        run.wait_for("is ready", 2)
        run.process.send_signal(number)
        run.wait_for("is told", 2)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == code
        assert "codes [137 (SIGKILL), 137 (SIGKILL)]" in run.output


def test_who_does_not_heed_the_signal_is_ended(tmp_path: Path) -> None:
    brief = PATIENT.replace("1e4", "0.1")
    with started(
        tmp_path, "--nproc", "2", RANKS, "deaf", str(tmp_path), entry=("-c", brief)
    ) as run:
        run.wait_for("is ready", 2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143
        assert "codes [137 (SIGKILL), 137 (SIGKILL)]" in run.output
        assert "ranks [0, 1] did not exit in time and were killed: a last" in run.output


LAST_WORDS = """
import signal, sys, time

def end(number, frame):
    time.sleep(0.5)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
print("is ready", flush=True)
while True:
    signal.pause()
"""


def test_one_process_has_time_for_a_last_checkpoint(tmp_path: Path) -> None:
    # Once: only ranks at the coordinator had, and one alone is not there.
    script = tmp_path / "script.py"
    script.write_text(LAST_WORDS)
    brief = PATIENT.replace("r.OWN_END_S = ", "").replace("1e4", "0.1")
    words = ("--nproc", "1", "--checkpoint-dir", str(tmp_path / "c"), str(script))
    with started(tmp_path, *words, entry=("-c", brief)) as run:
        run.wait_for("is ready", 1)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143
        assert "ended with codes" not in run.output


@pytest.mark.parametrize(("case", "code"), [("blamed", 7), ("earlier", 137)])
def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    tmp_path: Path, case: str, code: int
) -> None:
    # Once: 1, of rank 0.
    result, _ = launched(RANKS, case, str(tmp_path))
    assert result.exit_codes == (1, code)
    assert result.failed_first == 1
    assert result.failed_s is not None
    assert result.exit_code == code


def test_ranks_find_what_torchrun_would_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another launcher has set it before."""
    theirs = {
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
        "RANK": "5",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "6",
        "GROUP_RANK": "3",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    result, lines = launched(RANKS, "environment", str(tmp_path))
    assert result.exit_code == 0
    ports = set()
    for rank in range(2):
        found = dict(line.split("=", 1) for r, line in lines if r == rank)
        ports.add(found["MASTER_PORT"])
        expected = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": found["MASTER_PORT"],
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        of_launchers = {n: v for n, v in found.items() if n in theirs}
        assert of_launchers == expected
    assert len(ports) == 1
    assert int(ports.pop()) > 1


def test_groups_of_elche_do_not_meet_in_the_store_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the launcher needs no torch."""
    served: list[int] = []
    monkeypatch.setattr(torch_store, "_store_on", lambda fd, port: served.append(port))
    result, lines = launched(TRAINING, "ok")
    assert result.exit_code == 0
    assert sorted(lines) == [(0, "done 0 of 2"), (1, "done 1 of 2")]
    assert served == []
    assert result.have_met
    assert result.failed_s is None


def test_a_start_that_fails_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: a pipe, and the folder of the ranks' timelines."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trace = tmp_path / "trace.json"
    config = LaunchConfig(command=("x",), num_ranks=1, trace_path=trace)

    def fail(run: LaunchedRun) -> None:
        raise RuntimeError("no signal handler in this thread")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="no signal handler in this thread"):
        launch(config, fail)
    assert len(os.listdir("/proc/self/fd")) <= before  # of others may be closed
    assert [*tmp_path.iterdir()] == [trace]


def test_a_script_whose_ranks_never_meet_is_said_at_its_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('trained')")
    with started(tmp_path, "--nproc", "2", str(script), entry=ELCHE) as run:
        assert run.end() == 0
        said = "elche run: the script ran 2 times, and no ranks connected"
        assert said in run.output


def test_nobody_outlives_launcher_and_rank_that_die_together(tmp_path: Path) -> None:
    # Once: where a grant was in line the others waited for the rank to the deadline.
    with started(tmp_path, "--nproc", "3", TRAINING, "stop", "sync") as run:
        said = dict(run.wait_for(r"rank (\d) is process (\d+)", 3))
        pids = [int(said[str(rank)]) for rank in range(3)]
        until(lambda: is_stopped(pids[2]))
        run.process.kill()
        os.kill(pids[2], signal.SIGKILL)
        assert run.end() == -signal.SIGKILL
        until(lambda: all(map(_is_gone, pids)))


def test_the_launchers_death_ends_ranks_that_look_at_no_connection(
    tmp_path: Path,
) -> None:
    with started(tmp_path, "--nproc", "2", TRAINING, "idle") as run:
        pids = [int(p) for p in run.wait_for(r"is process (\d+)", 2)]
        launcher = run.process.pid
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
        stopped = pids[0], *({*map(int, children.split())} - {*pids})
        assert len(stopped) == 2  # a rank and the coordinator; once for ever
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
            until(lambda: is_stopped(pid))  # noqa: B023 - called here
        run.process.kill()
        run.process.wait()
        until(lambda: all(map(_is_gone, {*pids, *stopped})))
        ends = r"rank \d ends, since its launcher has ended or was killed\n"
        assert len(re.findall(ends, run.output)) == 2


def test_ranks_that_never_meet_end_when_they_like(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As two solo runs side by side: who is done first does not end the other."""
    monkeypatch.setattr(rank_processes, "GRACE_S", 0.2)
    script = tmp_path / "apart.py"
    script.write_text("import os, time\ntime.sleep(3 * int(os.environ['RANK']))\n")
    result, _ = launched(str(script))
    assert result.exit_codes == (0, 0)
