"""Ranks that srun, mpirun and others start, by the variables that those set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elche.errors import ConfigError
from elche.runtime.process.connect import connect
from elche.runtime.process.environment import read_placement
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
