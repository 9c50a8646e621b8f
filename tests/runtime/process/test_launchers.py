"""Ranks that srun, mpirun and others start: their variables, and the run's key."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from elche.errors import CommunicationError, ConfigError
from elche.runtime.process.connect import (
    _find_under_torchrun,
    _hide,
    _read_hidden,
    connect,
    stop_coordinator,
)
from elche.runtime.process.environment import Placement, read_placement
from elche.runtime.process.launchers import read_launcher
from tests.harness.ports import free_port
from tests.harness.printing import ended, started

# What each launcher sets on the last rank, of what elche reads; from their documents.
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "rack[03-04,7]-a",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPIEXEC = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
RAY = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "41234",
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}
TRAINING = """
import elche
from tests.harness.small_loop import begin, sum_of, take_step
model, optimizer, loader = begin(64, 8, leave_out=False)
for (x,) in loader:
    take_step(model, optimizer, x)
print(sum_of(model), elche.summary().transport)
elche.shutdown()
"""


def test_srun_is_read() -> None:
    read = read_launcher(SRUN)
    assert (read["RANK"], read["WORLD_SIZE"]) == ("4", "5")
    assert (read["LOCAL_RANK"], read["LOCAL_WORLD_SIZE"]) == ("0", "1")
    each = read_launcher(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x3)"})
    assert each["LOCAL_WORLD_SIZE"] == "1"
    assert (read["MASTER_ADDR"], read["MASTER_PORT"]) == ("rack03-a", "19567")


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b[1-2]", "a"), ("n[007,9],b", "n007")]
)
def test_the_first_node_of_srun_is_rank_0s(nodes: str, first: str) -> None:
    assert read_launcher(SRUN | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_a_batch_script_of_slurm_is_one_process() -> None:
    alone = {"SLURM_NTASKS": "5", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    assert read_placement(alone).world_size == 1


@pytest.mark.parametrize(
    "told",
    [{"SLURM_STEP_TASKS_PER_NODE": "two"}, {"SLURM_STEP_NODELIST": "a[1-2]b[3-4]"}],
)
def test_a_malformed_srun_is_refused(told: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"SLURM_STEP_TASKS_PER_NODE.*set RANK"):
        read_launcher(SRUN | told)


def test_mpi_is_read() -> None:
    placement = read_placement(MPIRUN)
    assert (placement.rank, placement.world_size) == (3, 4)
    assert read_launcher(MPIRUN)["LOCAL_WORLD_SIZE"] == "2"
    assert read_placement(MPIEXEC).rank == 1


def test_what_is_set_stays() -> None:
    assert read_launcher(RAY) == RAY
    assert read_launcher(SRUN | {"MASTER_PORT": "5"})["MASTER_PORT"] == "5"
    assert read_launcher(KUBEFLOW | MPIRUN)["RANK"] == "1"


@pytest.mark.parametrize("listen", ["0.0.0.0", "::"])
def test_an_address_that_nobody_reaches_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"other hosts reach.*or auto"):
        read_placement({"ELCHE_LISTEN": listen})


@pytest.mark.parametrize(
    ("told", "match"),
    [
        (KUBEFLOW, "LOCAL_WORLD_SIZE is not set.*ELCHE_LISTEN"),
        (SRUN, "4 ranks are on other hosts.*ELCHE_LISTEN"),
        (RAY, "2 ranks are on other hosts.*ELCHE_LISTEN"),
        (MPIRUN, "neither ELCHE_COORDINATOR nor MASTER_ADDR.*mpirun -x"),
    ],
)
def test_several_hosts_without_an_address_are_refused_at_once(
    told: dict[str, str], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=match):
        connect(read_placement(), timeout_s=300.0)


def test_ranks_of_srun_train_together(tmp_path: Path) -> None:
    port = free_port(ports=range(15_000, 25_000))  # those of Slurm
    told = {
        **SRUN,
        "SLURM_JOB_ID": str(port - 15000),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    own = [told | {"SLURM_PROCID": one, "SLURM_LOCALID": one} for one in "01"]
    program = [sys.executable, "-c", TRAINING]
    with started(tmp_path, program, program, variables=own) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0], ranks[0].output
    sums = [rank.wait_for(r"(\S+) shared memory\n") for rank in ranks]
    assert sums[0] == sums[1]


def test_an_address_of_its_own_is_found_under_elche_run_too(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    words = "-m", "elche", "run", "--speeds", "1,1", str(script)
    done = ended(*words, ELCHE_LISTEN="auto")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shared memory") == 2  # lines of ranks may mix


def test_a_key_is_this_users_alone_and_goes_with_the_coordinator() -> None:
    path = _hide("127.0.0.1:1/00")
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert _read_hidden(path) == "127.0.0.1:1/00"
    stop_coordinator()
    assert not Path(path).exists()


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("127.0.0.1:1/00")
    path.chmod(0o644)
    with pytest.raises(CommunicationError, match="not a file of this user alone"):
        _read_hidden(str(path))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default group of this process alone."""
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=100))
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for as long as the store of a default group waits."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    placement = Placement(world_size=2, device=torch.device("cpu"))
    begun_s = time.monotonic()
    with pytest.raises(CommunicationError, match="default group"):
        connect(placement, 0.5)
    assert time.monotonic() - begun_s < 50.0  # of the store's 100


def test_a_default_group_made_between_two_setups_starts_no_second_coordinator(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    placement = Placement(world_size=1, device=torch.device("cpu"))
    first = _find_under_torchrun(placement, os.environ, 60.0)
    request.getfixturevalue("group_of_one")
    assert _find_under_torchrun(placement, os.environ, 60.0) == first
    stop_coordinator()


@pytest.mark.usefixtures("group_of_one")
def test_elche_run_has_no_use_for_a_default_group() -> None:
    found = read_placement(
        {
            "ELCHE_COORDINATOR": "127.0.0.1:1",
            "ELCHE_KEY": "00" * 32,
            "RANK": "1",
            "WORLD_SIZE": "2",
        }
    )
    assert (found.rank, found.world_size) == (1, 2)
