"""Findings of ``elche doctor``, and the predicted gain of each policy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elche.cadence.chooser import Chooser
from elche.cadence.convergence import UPDATES
from elche.cadence.goodput import MeasuredCluster, Prediction, predict

SEVERITIES = ("broken", "warning", "note")
"""The worst first."""
OLDEST_TORCH = (2, 9)
LEAST_SHM_BYTES = 1 << 30
"""Docker gives 64 MiB: a few batches of DataLoader workers fill it."""
LEAST_FILES = 1024
LEAST_GAIN = 1.02
PLACES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ELCHE_COORDINATOR")
"""Variables that make a plain script wait for other ranks."""


class Finding(NamedTuple):
    """Something that looks wrong, with what to do about it: of `SEVERITIES`."""

    severity: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts of this machine and this environment.

    Attributes:
        versions: of elche, python and torch.
        platform: operating system and processor.
        cores: that this process may use.
        accelerators: kinds that torch can use: cuda, rocm, mps, xpu.
        has_nvidia: the system has an NVIDIA device, whatever torch sees.
        shm_bytes: size of ``/dev/shm``; None where there is none.
        open_files: limit of open files.
        loopback_error: why loopback cannot be used, "" if it can.
        environment: variables that matter here and are set.
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
    """Measurements of a rank, while all ranks measured.

    Attributes:
        rank: in the run.
        device: its name, such as ``cuda:0``.
        name: what the device is.
        sample_s: seconds per sample of the test network's step.
        fixed_s: seconds of a step, however small.
        overrun: part of an emulated device's steps that real computing took longer.
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
    """Seconds per sample and fixed seconds, from steps of one or two sizes."""
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
    """Each policy on all ranks, and what ``auto`` would choose and why."""
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
    """All that looks wrong, the worst first.

    Args:
        machine: what was read.
        devices: of the ranks, as they were to run.
        ranks: what was measured; empty if it could not be.
        predicted: of the policies.
        failure: why measuring failed, "" if it did not.
    """
    found = [*_of_machine(machine), *_of_devices(machine, devices)]
    if failure:
        found.append(Finding("broken", f"the ranks could not measure: {failure}"))
    for rank in ranks:
        if rank.overrun > 0.05:
            text = f"rank {rank.rank} is emulated faster than this machine computes "
            text += f"({rank.overrun:.0%} over): its speed is this machine's"
            found.append(Finding("warning", text))
    if predicted and max(each.goodput for each in predicted) < LEAST_GAIN:
        text = "these ranks together are predicted to be no faster than the fastest "
        text += "device alone, for this model and batch: larger batches, a model that "
        text += "computes more per parameter, or that device alone"
        found.append(Finding("warning", text))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _of_machine(machine: MachineFacts) -> Iterator[Finding]:
    torch = machine.versions["torch"]
    if tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        yield Finding("broken", f"torch {torch} is too old: elche needs 2.9 or newer")
    if machine.loopback_error:
        text = f"loopback (127.0.0.1) cannot be used: {machine.loopback_error}; ranks "
        yield Finding("broken", text + "of one host meet there")
    shm = machine.shm_bytes
    if shm is not None and shm < LEAST_SHM_BYTES:
        text = f"/dev/shm has {shm / 2**20:.0f} MiB, and DataLoader workers pass "
        text += "batches through it: in Docker start with --shm-size=2g or --ipc=host"
        yield Finding("warning", text)
    if machine.open_files < LEAST_FILES:
        text = f"at most {machine.open_files} files may be open; DataLoader workers "
        yield Finding("warning", text + "need more: ulimit -n 4096")
    if machine.has_nvidia and "cuda" not in machine.accelerators:
        hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else "its driver"
        text = f"this machine has an NVIDIA device that torch {torch} cannot use: "
        yield Finding("warning", f"{text}check {why}, and that torch is a CUDA build")
    if places := [name for name in PLACES if name in machine.environment]:
        text = f"{', '.join(places)} set in this shell: a plain `python script.py` "
        yield Finding("warning", text + "takes itself for a rank of a run; unset them")
    for kind in machine.accelerators:
        text = f"elche has never been run on {kind} by its authors: report what fails"
        if kind in ("mps", "xpu"):
            text = f"elche does not use {kind}: its devices are cpu and cuda:N"
        yield Finding("note", text)


def _of_devices(machine: MachineFacts, devices: Sequence[str]) -> Iterator[Finding]:
    for device in sorted(set(devices)):
        ranks = [rank for rank, name in enumerate(devices) if name == device]
        if device.startswith("cuda") and len(ranks) > 1:
            text = f"ranks {ranks} share {device}: they slow each other, and reduce "
            yield Finding("warning", text + "through gloo; give each its own device")
    on_cpu, cores = devices.count("cpu"), machine.cores
    threads = machine.environment.get("OMP_NUM_THREADS", "")
    if on_cpu > cores:
        text = f"{on_cpu} ranks compute on {cores} cores: they slow each other"
        yield Finding("warning", text)
    elif threads.isdigit() and on_cpu * int(threads) > cores:
        text = f"OMP_NUM_THREADS={threads} for each of {on_cpu} CPU ranks is more than "
        text += f"{cores} cores: unset it, elche run divides the cores"
        yield Finding("warning", text)
