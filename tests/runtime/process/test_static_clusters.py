"""Two hosts whose ranks torchrun or srun starts: network namespaces of one machine."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.links.namespaces import Link, slow_link
from elche.errors import ConfigError
from tests.harness import printing
from tests.harness.printing import Printing

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

CASES = Path(__file__).parent / "cases"
STEP = r"step \d+ at (\S+)"


@pytest.fixture
def link() -> Iterator[Link]:
    """A network namespace for each host; skips where there can be none."""
    try:
        with slow_link(2, 1000.0) as made:
            yield made
    except ConfigError as error:
        pytest.skip(f"needs network namespaces: {error}")


@contextmanager
def started(
    folder: Path,
    link: Link,
    words: Sequence[Sequence[str]],
    variables: Sequence[Mapping[str, str]] = ({}, {}),
) -> Iterator[list[Printing]]:
    """A Python program on each host."""
    programs = [
        [*link.command(host), sys.executable, *each] for host, each in enumerate(words)
    ]
    told = [{"ELCHE_LISTEN": "auto", **each} for each in variables]
    with printing.started(folder, *programs, variables=told) as hosts:
        yield hosts


def torchruns(link: Link, ranks: int, *words: str) -> list[tuple[str, ...]]:
    """The words of torchrun on each host."""
    where = "--master-addr", link.ranks[0][1], "--master-port", "29500"
    options = "--nnodes", "2", "--nproc-per-node", str(ranks), *where
    return [
        ("-m", "torch.distributed.run", *options, "--node-rank", str(number), *words)
        for number in (0, 1)
    ]


def srun(link: Link) -> list[dict[str, str]]:
    """The variables of srun on each host, a rank on each."""
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": link.ranks[0][1],
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
    }
    return [job | {"SLURM_PROCID": one, "SLURM_NODEID": one} for one in "01"]


def test_a_short_cut_is_a_wait(tmp_path: Path, link: Link) -> None:
    words = str(CASES / "endless.py"), "sync"
    with started(tmp_path, link, (words, words), srun(link)) as hosts:
        hosts[0].wait_for(STEP, 3)
        link.turn(1, "down")
        time.sleep(4.0)  # TCP tries again after 3.0 s and 6.2 s
        link.turn(1, "up")
        up_s, before = time.monotonic(), len(hosts[0].wait_for(STEP, 3))
        found = [float(at) for at in hosts[0].wait_for(STEP, before + 10)]
        assert max(b - a for a, b in pairwise(found)) > 2.0  # the fault has acted
        assert found[-1] > up_s


def test_a_host_that_is_lost_ends_the_run_by_name(tmp_path: Path, link: Link) -> None:
    words = torchruns(link, 1, str(CASES / "endless.py"), "sync")
    with started(tmp_path, link, words) as hosts:
        hosts[0].wait_for(STEP, 3)
        hosts[1].process.send_signal(signal.SIGTERM)
        assert all(host.end() for host in hosts)
        assert "a run without a launcher of elche's" in hosts[0].output


@pytest.mark.slow
def test_torchrun_restarts_all_ranks_of_two_hosts(tmp_path: Path, link: Link) -> None:
    """By its c10d rendezvous, after a death before the first epoch."""
    meeting = "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{link.ranks[0][1]}:29500"
    options = "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1"
    script = str(CASES / "supervised.py"), "restart", str(tmp_path)
    words = []
    for number in (0, 1):
        own = "--local-addr", link.ranks[number][1]
        # Both namespaces have one host name, by which torch tells who serves.
        serves = "--rdzv-conf", f"is_host={int(number == 0)}"
        run = "-m", "torch.distributed.run", *options, *meeting
        words.append((*run, *own, *serves, *script))
    with started(tmp_path, link, words) as hosts:
        assert [host.end() for host in hosts] == [0, 0], hosts[0].output
    assert (tmp_path / "died").exists()
    assert len([*tmp_path.glob("ended-*")]) == 2
