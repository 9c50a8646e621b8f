"""The supervisor of a run on Ray, without a cluster."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

import elche.ray
from elche.errors import CommunicationError
from elche.ray import ray_ranks, running
from elche.ray.rank_specs import Job
from elche.ray.ray_ranks import RayProcess, RayRanks
from elche.ray.running import Supervisor
from elche.runtime.process.launch_config import LaunchConfig
from elche.runtime.process.restarts import RestartConfig


def test_a_start_that_fails_in_an_unforeseen_way_ends() -> None:
    async def fail(process: RayProcess) -> int:
        raise ValueError("no such resource")

    async def start() -> int:
        process = RayProcess(fail)
        return await asyncio.wait_for(process.wait(), 5.0)

    assert asyncio.run(start()) == 1


def test_a_rank_gets_ctrl_c_though_rays_nodes_block_it() -> None:
    show = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    ours, theirs = socket.socketpair()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with ours, theirs:
            words = (str(theirs.fileno()), str(os.getpid()), "-c", show)
            shown = subprocess.check_output(
                (sys.executable, "-m", "elche.launching.remote_rank", *words),
                pass_fds=(theirs.fileno(),),
                timeout=60.0,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert shown == b"set()\n"


def test_a_signal_before_the_launch_and_between_two_is_kept() -> None:
    made: Any = Supervisor(Job([], b"", LaunchConfig(command=()), RestartConfig(), 1.0))
    first, second = Mock(), Mock()
    made.interrupt(signal.SIGINT)
    made._begin(first)
    first.interrupt.assert_called_once_with(signal.SIGINT)
    made.interrupt(signal.SIGTERM)
    made._begin(second)
    second.interrupt.assert_called_once_with(signal.SIGTERM)


def test_a_rank_without_room_is_named_while_it_waits_and_when_it_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = elche.ray.RankSpec(label_selector={"kind": "late"})
    made: Any = Mock(_places=[(spec, None)], results={})
    made._job.start_s, made._config.world_size = 0.05, 1
    monkeypatch.setattr(ray_ranks, "SAY_S", 0.0)

    async def waits() -> int:
        made._begin = lambda *_: asyncio.Event().wait()
        return await RayRanks._run(made, Mock(trouble=""), 0, 0, {})

    assert asyncio.run(waits()) == 1
    lacks = "a node with {'CPU': 1.0} free and labels {'kind': 'late'}"
    assert f"rank 0 waits for {lacks}" in caplog.messages
    assert pickle.loads(made.results[0])[1].endswith(lacks)
    made._drop.assert_called_once_with(0)


def test_nodes_come_and_go_and_ray_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is survived; a lasting one ends the run by name."""
    seen: Iterator[Any] = iter([OSError("away"), ["a", "b"], ["b", "c"], ["b", "c"]])

    def fitting(ranks: Any) -> Any:
        if isinstance(found := next(seen, OSError("gone")), list):
            return found
        raise found

    monkeypatch.setattr(running, "_fitting", fitting)
    monkeypatch.setattr(running, "LOOK_S", 0.0)
    run, there = Mock(join=AsyncMock()), Mock(add=Mock(return_value=7))
    there.move.side_effect = [OSError("away"), None]
    places = {"a": 0}
    with pytest.raises(CommunicationError, match=r"30 times in a row .*gone"):
        asyncio.run(running._add_nodes(run, there, elche.ray.per_node(), places))
    run.join.assert_awaited_once_with(7)
    there.move.assert_called_with(0, elche.ray.per_node().on("c"))
    assert places == {"b": 7, "c": 0}
    run.interrupt.assert_called_once_with(signal.SIGTERM)
