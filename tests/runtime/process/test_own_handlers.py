"""Signals to the launcher that scripts handle, and ranks that run no Python."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from elche.runtime.coordinator_process.link import Status
from elche.runtime.process.rank_processes import SIGNALS, RankProcesses
from tests.runtime.process.test_launcher import RANKS, started

pytestmark = pytest.mark.distributed

SCRIPT = str(Path(__file__).parent / "cases" / "handlers.py")


@pytest.fixture(autouse=True)
def default_hang_ups() -> Iterator[None]:
    """Launchers get the default of SIGHUP, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_signals_reach_the_handlers_of_every_rank(tmp_path: Path) -> None:
    # Once: SIGUSR1 and SIGHUP killed the launcher, and SIGTERM raised RemoteRankError.
    with started(tmp_path, "--nproc", "2", SCRIPT) as run:
        run.wait_for(r"rank \d trains", 2)
        for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGTERM"):
            run.process.send_signal(signal.Signals[name])
            run.wait_for(rf"rank \d got {name}", 2)
        run.wait_for(r"rank \d saved", 2)
        assert run.end() == 128 + signal.SIGTERM
    assert "ended with" not in run.output
    assert run.output.count("got SIGTERM") == 2


def test_one_rank_that_handles_sigterm_has_time_and_the_others_end(
    tmp_path: Path,
) -> None:
    with started(tmp_path, "--nproc", "2", RANKS, "first", str(tmp_path)) as run:
        run.wait_for("is ready", 2)
        run.wait_until_idle()
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
        for rank, count in enumerate((1, 0)):
            assert f"rank {rank} is through with {count} signals" in run.output
        reason = "interrupted: the launcher received SIGTERM"
        assert f"ended with codes [1, 1]: {reason}" in run.output


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_a_signal_that_no_script_handles_ends_the_run(
    name: str, tmp_path: Path
) -> None:
    with started(tmp_path, "--nproc", "2", RANKS, "apart", str(tmp_path)) as run:
        run.wait_for("is ready", 2)
        run.process.send_signal(signal.Signals[name])
        assert run.end() == 128 + signal.Signals[name]
        assert f"interrupted: the launcher received {name}" in run.output


def test_under_nohup_hang_ups_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[signal.Signals]()
    loop = Mock(add_signal_handler=lambda number, *_: taken.append(number))
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    ignored = {signal.SIGHUP: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", ignored.get)
    RankProcesses.handle_signals(Mock())
    assert {*taken} == {*SIGNALS, signal.SIGUSR1, signal.SIGUSR2}


def test_a_replacement_that_starts_does_not_cost_the_last_checkpoint() -> None:
    only_0 = frozenset({0})
    server = Mock(status=Status(connected=only_0, heeding=only_0, members=only_0))
    server.has_dropped = lambda rank: rank not in server.status.members
    processes = RankProcesses(server, Mock(), Mock())
    ranks = processes._processes = {0: Mock(returncode=None), 1: Mock(returncode=None)}
    processes.interrupt(signal.SIGTERM)
    server.take.assert_not_called()
    for each in ranks.values():
        each.send_signal.assert_called_once_with(signal.SIGTERM)
