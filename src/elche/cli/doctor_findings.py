"""Findings of ``elche doctor``, and the predicted gain of each policy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from elche.cadence.chooser import Chooser
from elche.cadence.convergence import UPDATES
from elche.cadence.goodput import MeasuredCluster, Prediction, predict

SEVERITIES = ("broken", "warning", "note")
"""Severities of findings, the worst first."""
OLDEST_TORCH = (2, 9)
LEAST_SHM_BYTES = 1 << 30
"""Minimum size of /dev/shm; Docker's 64 MiB hold few DataLoader batches."""
LEAST_FILES = 1024
LEAST_GAIN = 1.02
PLACES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ELCHE_COORDINATOR")
"""Variables that make a plain script wait for other ranks."""


class Finding(NamedTuple):
    """A likely problem, with its severity (`SEVERITIES`) and a remedy in the text."""

    severity: str
    text: str


_warning = partial(Finding, "warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts of this machine and this environment.

    Attributes:
        versions: versions of elche, python and torch.
        platform: operating system and processor.
        cores: cores that this process may use.
        accelerators: types that torch can use, such as cuda, rocm or xpu.
        has_nvidia: whether the system has an NVIDIA device, even if torch cannot use
            it.
        shm_bytes: size of ``/dev/shm``; None if it does not exist.
        open_files: limit of open files.
        loopback_error: error of a loopback connection, or "".
        environment: relevant environment variables that are set.
    """

    versions: Mapping[str, str]
    platform: str
    cores: int
    accelerators: Sequence[str]
    has_nvidia: bool
    shm_bytes: int | None
    open_files: int
    loopback_error: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Measurements of a rank, taken while all ranks measured.

    Attributes:
        rank: the rank.
        device: the device's name in torch, such as ``cuda:0``.
        name: the device's model name.
        sample_s: seconds per sample of the test network's step.
        fixed_s: fixed seconds per step.
        overrun: fraction by which real computing exceeded the emulated time.
        links: latency in seconds and bytes per second, by transport.
        reduction_s: seconds of one reduction of the test network.
    """

    rank: int
    device: str
    name: str
    sample_s: float
    fixed_s: float
    overrun: float
    links: Mapping[str, tuple[float, float]]
    reduction_s: float


def cost_of_steps(times_s: Mapping[int, float]) -> tuple[float, float]:
    """Seconds per sample and fixed seconds, fitted to steps of one or two sizes."""
    few, many = min(times_s), max(times_s)
    whole_s = times_s[many]
    sample_s = whole_s / many
    if few < many:
        slope_s = (whole_s - times_s[few]) / (many - few)
        sample_s = min(sample_s, max(slope_s, 1e-6 * sample_s))
    return sample_s, max(0.0, whole_s - many * sample_s)


def predictions(
    ranks: Sequence[RankReport], batch_size: int
) -> tuple[list[Prediction], str]:
    """Predictions of each policy on all ranks, and the choice of ``auto``."""
    if len(ranks) < 2:
        return [], ""
    cluster = MeasuredCluster(
        seconds_per_sample=[rank.sample_s for rank in ranks],
        fixed_s=[rank.fixed_s for rank in ranks],
        batch_size=-(-batch_size // len(ranks)),
        sync_batch_size=batch_size,
        sync_s=max(rank.reduction_s for rank in ranks),
    )
    found = [predict(policy, cluster) for policy in UPDATES]
    return found, Chooser().choose(cluster).reason


def findings(
    machine: MachineFacts,
    devices: Sequence[str],
    ranks: Sequence[RankReport] = (),
    predicted: Sequence[Prediction] = (),
    failure: str = "",
) -> list[Finding]:
    """All likely problems, the worst first.

    Args:
        machine: facts of the machine.
        devices: requested devices of the ranks.
        ranks: measurements; empty if measuring failed.
        predicted: predictions of the policies.
        failure: reason why measuring failed, or "".
    """
    found = [*_of_machine(machine), *_of_devices(machine, devices)]
    if failure:
        found.append(Finding("broken", f"the ranks could not measure: {failure}"))
    found += [
        _warning(
            f"rank {rank.rank} is emulated faster than this machine computes "
            f"({rank.overrun:.0%} over): its speed is this machine's"
        )
        for rank in ranks
        if rank.overrun > 0.05
    ]
    if predicted and max(each.goodput for each in predicted) < LEAST_GAIN:
        found.append(
            _warning(
                "these ranks together are predicted to be no faster than the fastest "
                "device alone, for this model and batch: larger batches, a model that "
                "computes more per parameter, or that device alone"
            )
        )
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _of_machine(machine: MachineFacts) -> Iterator[Finding]:
    torch, environment = machine.versions["torch"], machine.environment
    shm = machine.shm_bytes
    if tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        yield Finding("broken", f"torch {torch} is too old: elche needs 2.9 or newer")
    if machine.loopback_error:
        yield Finding(
            "broken",
            f"loopback (127.0.0.1) cannot be used: {machine.loopback_error}; ranks of "
            "one host meet there",
        )
    if shm is not None and shm < LEAST_SHM_BYTES:
        yield _warning(
            f"/dev/shm has {shm / 2**20:.0f} MiB, and DataLoader workers pass batches "
            "through it: in Docker start with --shm-size=2g or --ipc=host"
        )
    if machine.open_files < LEAST_FILES:
        yield _warning(
            f"at most {machine.open_files} files may be open; DataLoader workers need "
            "more: ulimit -n 4096"
        )
    if machine.has_nvidia and not machine.accelerators:
        hidden = environment.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else "its driver"
        yield _warning(
            f"this machine has an NVIDIA device that torch {torch} cannot use: check "
            f"{why}, and that torch is a CUDA build"
        )
    if places := [name for name in PLACES if name in environment]:
        yield _warning(
            f"{', '.join(places)} set in this shell: a plain `python script.py` takes "
            "itself for a rank of a run; unset them"
        )
    for kind in machine.accelerators:
        yield Finding(
            "note",
            f"elche has never been run on {kind} by its authors: report what fails",
        )


def _of_devices(machine: MachineFacts, devices: Sequence[str]) -> Iterator[Finding]:
    for device in sorted(set(devices)):
        ranks = [rank for rank, name in enumerate(devices) if name == device]
        if device != "cpu" and len(ranks) > 1:
            yield _warning(
                f"ranks {ranks} share {device}: they slow each other, and reduce "
                "through gloo; give each its own device"
            )
    on_cpu, cores = devices.count("cpu"), machine.cores
    threads = machine.environment.get("OMP_NUM_THREADS", "")
    if on_cpu > cores:
        yield _warning(f"{on_cpu} ranks compute on {cores} cores: they slow each other")
    elif threads.isdigit() and on_cpu * int(threads) > cores:
        yield _warning(
            f"OMP_NUM_THREADS={threads} for each of {on_cpu} CPU ranks is more than "
            f"{cores} cores: unset it, elche run divides the cores"
        )
