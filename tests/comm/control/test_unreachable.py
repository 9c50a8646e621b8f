"""A rank whose link to the coordinator is cut, in a network namespace of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from benchmarks.links.namespaces import slow_link
from elche.errors import ConfigError
from elche.runtime.process.coordinator import CoordinatorServer

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

KEY = b"k" * 32
RANK = f"""
import sys, time
from elche.comm.control import control_channel
from elche.runtime.process import heartbeat
control_channel.UNREACHABLE_S = 2.0
heartbeat.END_AFTER_S = 1.0
address = sys.argv[1], int(sys.argv[2])
connect = control_channel.ControlChannel.connect
channel = connect(address, {KEY!r}, 0, 60.0, resumes=True)
heartbeat.Heartbeat(channel)
print("up", flush=True)
if sys.argv[3] == "waits":
    channel.receive(60.0, "an instruction")
time.sleep(60.0)  # as in an evaluation
"""


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("waits", "CommunicationError: rank 0 lost the coordinator"),
        ("computes", "elche: a rank ends: it cannot reach its coordinator"),
    ],
)
def test_a_rank_that_does_not_reach_it_ends(does: str, says: str) -> None:
    async def cut() -> tuple[float, str]:
        server = CoordinatorServer(1, KEY)
        host, port = await server.start(link.listener())
        rank = await asyncio.create_subprocess_exec(
            *(*link.command(0), sys.executable, "-c", RANK, host, str(port), does),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert rank.stdout is not None
        assert await rank.stdout.readline() == b"up\n"
        link.turn(0, "down")
        begun_s = time.monotonic()
        _, said = await asyncio.wait_for(rank.communicate(), 50.0)
        await server.stop()
        assert rank.returncode == 1, said
        return time.monotonic() - begun_s, said.decode()

    try:
        with slow_link(1, 1000.0) as link:
            after_s, said = asyncio.run(cut())
    except ConfigError as error:
        pytest.skip(f"needs network namespaces: {error}")
    assert says in said
    assert after_s < 30.0
