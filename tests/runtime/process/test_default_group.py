"""A default group of torch.distributed ends survival, a stranger at its port not."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from elche.comm.transport.torch_store import HOST, TorchStore

pytestmark = pytest.mark.distributed

SCRIPT = """
import os, signal, socket, sys, time
from torch import distributed
import elche
from tests.harness.small_loop import begin, take_step

where, rank = sys.argv[1], int(os.environ["RANK"])
if where == "before":
    distributed.init_process_group("gloo")
model, optimizer, loader = begin(64, 8)
held = []
for epoch in elche.epochs(3):
    if epoch == 1 and where == "inside":
        distributed.init_process_group("gloo")
    for number, (x,) in enumerate(loader):
        take_step(model, optimizer, x)
        if (epoch, number, rank) == (0, 1, 0) and where == "stranger":
            for said in (None, b"", b"GET / HTTP/1.0\\r\\n\\r\\n"):
                port = int(os.environ["MASTER_PORT"])
                held.append(socket.create_connection(("127.0.0.1", port)))
                if said is not None:
                    held[-1].sendall(said)
                    held.pop().close()
    elche.barrier()
    if (epoch, rank) == (1, 1):
        print("rank 1 dies", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
print("through", flush=True)
"""
SAID = "torch.distributed's default process group exists: the death of any rank ends"


def run(tmp_path: Path, where: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "elche", "run", "--nproc", "2", str(script), where],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_strangers_at_its_port_cost_nothing(tmp_path: Path) -> None:
    """Once each death ended the run then, without a word."""
    ended = run(tmp_path, "stranger")
    assert "rank 1 dies" in ended.stdout
    assert ended.returncode == 0, ended.stdout
    assert "through" in ended.stdout
    assert SAID not in ended.stdout


@pytest.mark.parametrize(
    "where", ["inside", pytest.param("before", marks=pytest.mark.slow)]
)
def test_a_group_of_the_script_is_said_and_ends_with_a_death(
    tmp_path: Path, where: str
) -> None:
    ended = run(tmp_path, where)
    assert "rank 1 dies" in ended.stdout
    assert ended.returncode == 137, ended.stdout
    assert "through" not in ended.stdout
    assert ended.stdout.count(SAID) == 1
    assert ended.stdout.index(SAID) < ended.stdout.index("rank 1 dies")
    assert re.search(r"the death of a rank ends a script that meets", ended.stdout)


def test_clients_of_torch_find_a_store() -> None:
    async def meet() -> None:
        store = TorchStore()
        place = HOST, int(store.environment()["MASTER_PORT"])
        assert not store.is_used
        for number in range(2):
            client = await asyncio.to_thread(TCPStore, *place, is_master=False)
            await asyncio.to_thread(client.set, str(number), b"x" * 100_000)
            assert await asyncio.to_thread(client.get, "0") == b"x" * 100_000
            del client
        assert store.is_used
        await store.close()

    asyncio.run(meet())
