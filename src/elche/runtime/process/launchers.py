"""Environment variables of ranks, mapped from other launchers to torchrun's.

torchrun, Kubeflow's training operator and Ray Train set ``RANK``, ``WORLD_SIZE`` and
``MASTER_ADDR`` themselves. Slurm's srun and MPI's mpirun have names of their own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from elche.comm.control.addresses import format_address
from elche.errors import ConfigError

LAUNCH: Final = "ELCHE_LAUNCH"

# As Lightning does: jobs of one host at one time get different ports.
_FIRST_PORT = 15000
_PORTS = 10000

# Rank, world size, rank and ranks on this host.
_MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def read_launcher(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with torchrun's variables, if Slurm or MPI started this process.

    A variable that is set stays as it is. Slurm counts only inside a step that srun
    started with several tasks: a batch script or an interactive shell is one process.

    Raises:
        ConfigError: Slurm's variables are malformed.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return environment
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return {**_slurm(environment), **environment}
    for names in _MPI:
        if environment.get(names[1], "1") != "1" and names[0] in environment:
            found = zip(_TORCHRUN, names, strict=True)
            told = {
                ours: environment[name] for ours, name in found if name in environment
            }
            return {**told, **environment}
    return environment


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    try:
        node = int(environment["SLURM_NODEID"])
        counts = _tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        nodes = environment["SLURM_STEP_NODELIST"]
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(counts[node]),
            "MASTER_ADDR": _first_node(nodes),
            "MASTER_PORT": str(_FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _PORTS),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(
            "expected srun's variables (SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, "
            "SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST, SLURM_JOB_ID) beside "
            f"SLURM_STEP_NUM_TASKS, got {error!r}; set RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT instead"
        ) from error


def _tasks_per_node(text: str) -> list[int]:
    """Expands Slurm's ``2(x3),1`` to 2, 2, 2, 1."""
    counts = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(text)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _first_node(nodes: str) -> str:
    """The first name of Slurm's ``rack[03-05,7]-a,other``."""
    found = re.fullmatch(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?(?:,.*)?", nodes)
    if found is None:
        raise ValueError(nodes)
    return found[1] + (found[2] or "") + (found[3] or "")


def rank_environment(
    rank: int, world_size: int, address: tuple[str, int], key: bytes
) -> dict[str, str]:
    """Environment of a rank: torchrun's variables, and the coordinator's address.

    Args:
        rank: its number.
        world_size: ranks that the run begins with.
        address: address of the coordinator.
        key: the run's secret.
    """
    return {
        "ELCHE_COORDINATOR": format_address(*address),
        "ELCHE_KEY": key.hex(),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """The launcher's options for a rank.

    Attributes:
        pipe: descriptor that closes when the launcher ends; -1 without one.
        joins: the rank joins a running run, and is numbered after its ranks.
        may_grow: other ranks may join the run.
        resumes: the coordinator is restarted when it dies.
        is_watched: the launcher keeps the run's events, also those of one rank.
    """

    pipe: int = -1
    joins: bool = False
    may_grow: bool = False
    resumes: bool = False
    is_watched: bool = False

    def environment(self) -> dict[str, str]:
        """The facts as a variable of a rank's environment."""
        return {LAUNCH: json.dumps(asdict(self))}


def launch_facts(environment: Mapping[str, str] = os.environ) -> LaunchFacts:
    """Reads the facts; defaults if no launcher of elche has started this rank.

    Raises:
        ConfigError: they are not of this version.
    """
    text = environment.get(LAUNCH, "{}")
    try:
        return LaunchFacts(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"expected {LAUNCH} as `elche run` of this version sets it, got {text!r}; "
            "unset it"
        ) from error
