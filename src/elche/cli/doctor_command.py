"""``elche doctor``: devices, links, predictions, and likely problems."""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from elche import __version__
from elche.cadence.goodput import Prediction
from elche.cli.doctor_findings import (
    PLACES,
    MachineFacts,
    RankReport,
    findings,
    predictions,
)
from elche.cli.doctor_probe import MARK
from elche.cli.files import check_outputs, write_json
from elche.devices import choice
from elche.runtime.process.launch import launch
from elche.runtime.process.launch_config import LaunchConfig, python_command

SHOWN = (*PLACES, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
SHM = Path("/dev/shm")
PROBE = "elche.cli.doctor_probe"


def run_doctor(
    settings: LaunchConfig, parameters: int, batch_size: int, json_path: str | None
) -> int:
    """Measures, prints, and returns the exit code: 1 if a finding is "broken".

    Args:
        settings: launch settings of the ranks.
        parameters: size of the test network.
        batch_size: samples of a global batch.
        json_path: path for the JSON report; "-" is standard output.
    """
    check_outputs(json_path)
    machine, ranks, failure = read_machine(), list[RankReport](), ""
    command = python_command("-m", PROBE, str(parameters), str(batch_size))
    if not machine.loopback_error:
        ranks, failure = _measure(replace(settings, command=command))
    devices = [rank.device for rank in ranks] or list(settings.devices or ())
    predicted, choice = predictions(ranks, batch_size)
    found = findings(machine, devices, ranks, predicted, failure)
    values = {
        "machine": asdict(machine),
        "parameters": parameters,
        "batch_size": batch_size,
        "ranks": [asdict(rank) for rank in ranks],
        "policies": {each.policy: asdict(each) for each in predicted},
        "auto": choice,
        "findings": [{"severity": each[0], "text": each[1]} for each in found],
    }
    write_json(json_path, values)
    if json_path != "-":
        print(
            *_machine_lines(machine),
            *_rank_lines(ranks, parameters, batch_size),
            *_prediction_lines(predicted, choice),
            *([": ".join(each) for each in found] or ["nothing looks wrong"]),
            sep="\n",
        )
    return int(any(each.severity == "broken" for each in found))


def read_machine() -> MachineFacts:
    """Collects facts of this machine, its torch and this environment."""
    shm = os.statvfs(SHM) if SHM.is_dir() else None
    python = ".".join(map(str, sys.version_info[:3]))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return MachineFacts(
        versions={"elche": __version__, "python": python, "torch": torch.__version__},
        platform=f"{platform.system()} {platform.machine()}",
        cores=cores or 1,
        accelerators=list(filter(None, [choice.vendor_kind()])),
        has_nvidia=Path("/dev/nvidiactl").exists(),
        shm_bytes=None if shm is None else shm.f_blocks * shm.f_frsize,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        loopback_error=_loopback_error(),
        environment={name: os.environ[name] for name in SHOWN if name in os.environ},
    )


def _loopback_error() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5.0).close()
    except OSError as error:
        return str(error)
    return ""


def _measure(settings: LaunchConfig) -> tuple[list[RankReport], str]:
    """Reports of all ranks in order, and the reason if there are none."""
    reports: list[RankReport] = []

    def collect(rank: int, line: str) -> None:
        if line.startswith(MARK):
            reports.append(RankReport(**json.loads(line[len(MARK) :])))

    result = launch(replace(settings, on_line=collect))
    if result.signal:
        raise SystemExit(result.exit_code)
    if result.exit_code:
        failed = f"rank {result.failed_first} failed"
        return [], (result.reason.strip().splitlines() or [failed])[-1]
    return sorted(reports, key=lambda report: report.rank), ""


def _machine_lines(machine: MachineFacts) -> Iterator[str]:
    versions = ", ".join(f"{name} {text}" for name, text in machine.versions.items())
    yield f"{versions}; {machine.platform}, {machine.cores} cores"
    yield f"torch can use: {', '.join(['cpu', *machine.accelerators])}\n"


def _rank_lines(
    ranks: Sequence[RankReport], parameters: int, batch_size: int
) -> Iterator[str]:
    if not ranks:
        return
    yield f"all at once: {parameters:,} parameters, batches of {batch_size}"
    yield f"rank  {'device':32}  samples/s  fixed ms"
    for rank in ranks:
        speed = batch_size / (rank.fixed_s + batch_size * rank.sample_s)
        yield (
            f"{rank.rank:4}  {rank.device + ' ' + rank.name:32.32}  "
            f"{speed:9.1f}  {rank.fixed_s * 1e3:8.2f}"
        )
    for transport, (latency_s, rate) in ranks[0].links.items():
        link = f"{latency_s * 1e6:.0f} µs latency, {rate / 1e6:.0f} MB/s"
        yield f"sum over all ranks by {transport}: {link}"
    if len(ranks) > 1:
        reduction_s = max(rank.reduction_s for rank in ranks)
        yield f"of this network's gradients: {reduction_s * 1e3:.1f} ms\n"


def _prediction_lines(predicted: Sequence[Prediction], choice: str) -> Iterator[str]:
    if not predicted:
        return
    yield "predicted for this network; a gain of 1.00 is the fastest device alone"
    yield "policy   gain  hardware eff.  sample eff."
    for each in predicted:
        yield (
            f"{each.policy:7} {each.goodput:5.2f}  {each.hardware_efficiency:13.0%}  "
            f"{each.sample_efficiency:11.0%}"
        )
    yield f"auto would choose {choice}\n"
