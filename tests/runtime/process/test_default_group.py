"""A default group of torch.distributed ends survival, a stranger at its port not."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from elche.comm.transport.torch_store import HOST, TorchStore
from tests.harness.ports import free_port
from tests.harness.printing import started

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


def run(tmp_path: Path, where: str) -> tuple[int, str]:
    """The exit code, and what it printed."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = "-m", "elche", "run", "--nproc", "2", str(script), where
    with started(tmp_path, [sys.executable, *words]) as [one]:
        return one.end(), one.output


def test_strangers_at_its_port_cost_nothing(tmp_path: Path) -> None:
    """Once each death ended the run then, without a word."""
    code, output = run(tmp_path, "stranger")
    assert "rank 1 dies" in output
    assert code == 0, output
    assert "through" in output
    assert SAID not in output


@pytest.mark.parametrize(
    "where", ["inside", pytest.param("before", marks=pytest.mark.slow)]
)
def test_a_group_of_the_script_is_said_and_ends_with_a_death(
    tmp_path: Path, where: str
) -> None:
    code, output = run(tmp_path, where)
    assert "rank 1 dies" in output
    assert code == 137, output
    assert "through" not in output
    assert output.count(SAID) == 1
    assert output.index(SAID) < output.index("rank 1 dies")
    assert "the death of a rank ends a script with" in output


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


JOINED = """
import os, sys
import torch
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset
import elche

method, rank, wanted = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", method, rank=rank, world_size=2)
if wanted:
    os.environ.update(RANK="0", WORLD_SIZE=wanted)
for run in range(2):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.ones(64, 2)), 8)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    seen = 0
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += len(x)
    total = torch.tensor(seen)
    distributed.all_reduce(total)  # the script's own group stays whole
    print(elche.rank(), elche.world_size(), int(total), model.bias.item(), flush=True)
"""


def run_two(
    tmp_path: Path, method: str, variables: dict[str, str], wanted: str = ""
) -> list[tuple[int, str]]:
    """The exit codes of two ranks, and what they printed."""
    script = tmp_path / "joined.py"
    script.write_text(JOINED)
    words = sys.executable, str(script), method
    programs = [(*words, str(rank), wanted) for rank in range(2)]
    own = [{n: v.format(rank=r) for n, v in variables.items()} for r in range(2)]
    with started(tmp_path, *programs, variables=own) as ranks:
        return [(each.end(), each.output) for each in ranks]


def test_the_store_of_a_default_group_serves(tmp_path: Path) -> None:
    """As Ray Train makes one, whose store holds MASTER_PORT, and without variables."""
    port = free_port()
    ray_train = {
        "RANK": "{rank}",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for method, variables in (
        (f"tcp://127.0.0.1:{port}", ray_train),
        (f"file://{tmp_path}/rendezvous", {}),
    ):
        ranks = run_two(tmp_path, method, variables)
        assert [code for code, _ in ranks] == [0, 0], ranks
        said = [re.findall(r"^(\d \d+ \d+) (\S+)$", out, re.M) for _, out in ranks]
        for rank, lines in enumerate(said):
            assert [line for line, _ in lines] == [f"{rank} 2 64"] * 2
        assert len({bias for lines in said for _, bias in lines}) == 1


def test_variables_unlike_the_default_group_are_refused(tmp_path: Path) -> None:
    where = f"file://{tmp_path}/rendezvous"
    for code, output in run_two(tmp_path, where, {}, wanted="1"):
        assert code == 1
        assert "as in torch.distributed's default group" in output
