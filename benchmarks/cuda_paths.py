r"""Every path of an accelerator in one call: tests, then all mixes of ranks, one table.

    python -m benchmarks.cuda_paths --json cuda.json
    python -m benchmarks.cuda_paths --device xpu
    python -m benchmarks.cuda_paths --device cpu --little    without an accelerator
    PYTHONPATH=tests/device/autoload:. python -m benchmarks.cuda_paths \
        --device tdev --little    on the test device

Runs the tests of devices, and trains `cuda_job.py` on one GPU alone, on the CPU alone,
on two ranks of one GPU (gloo), on a GPU beside a CPU rank, each under every policy,
with mixed precision, and with each codec. Then the parts for loops of one's own
(`cuda_parts.py`: DistributedDataParallel, SyncBatchNorm, Replica, Pipeline, and large
messages between its stages) on both mixes, against one process on the CPU; with two
GPUs on both of them as well, through their own backend (NCCL). Ends with code 2 where
there is no such device, with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from elche.devices import choice

HERE = Path(__file__).resolve().parent
POLICIES = ("sync", "cadence", "async", "auto")
CODECS = ("bf16", "int8", "int4")
PARTS = ("ddp", "sync_batch_norm", "replica", "pipeline", "messages")
MIXES = (("two ranks of one gpu", "gpu:0,gpu:0"), ("gpu and cpu", "gpu:0,cpu"))
TWO_GPUS = ("two gpus", "gpu:0,gpu:1")
WORST_DIFFERENCE = 1e-9
"""Of a part in float64; devices sum in other orders."""
JOB_TIMEOUT_S = 300.0
LITTLE_WORK = ("--samples", "256", "--epochs", "1", "--width", "4", "--workers", "0")


@dataclass(frozen=True)
class Case:
    """One call of `elche run`.

    Attributes:
        name: in the table.
        devices: of the ranks; `gpu` is the accelerator's type.
        script: beside this file, and its options.
        environment: what to set for it.
    """

    name: str
    devices: str
    script: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def run_case(case: Case, kind: str, little: bool) -> dict[str, object]:
    """Runs once on a type of device; the script's figures, or what went wrong."""
    script, *options = case.script
    devices = case.devices.replace("gpu", kind)
    command = [sys.executable, "-m", "elche", "run", "--devices", devices]
    command += [str(HERE / script), *options]
    if little and script == "cuda_job.py":
        command += LITTLE_WORK
    environment = {**os.environ, "OMP_NUM_THREADS": "4", **dict(case.environment)}
    started_s = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=JOB_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {JOB_TIMEOUT_S:g} s"}
    figures = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not figures:
        return {"error": (done.stderr or done.stdout)[-2000:]}
    found = json.loads(figures[-1])
    if not found.get("difference", 0.0) <= WORST_DIFFERENCE:
        found["error"] = f"differs from one process by {found['difference']:.2g}"
    return {**found, "wall_s": time.monotonic() - started_s}


def job(name: str, devices: str, policy: str, *options: str) -> Case:
    """A training run of `cuda_job.py`."""
    environment = (("ELCHE_POLICY", policy),)
    return Case(name, devices, ("cuda_job.py", *options), environment)


def cases(kind: str, has_two_gpus: bool) -> list[Case]:
    """What is run on a machine with one GPU, and what on one with more.

    torch's wrapper sums through gloo, where that takes tensors of the device.
    """
    mixes = (*MIXES, *[TWO_GPUS] * has_two_gpus)
    in_gloo = kind in torch.distributed.Backend.backend_capability["gloo"]
    alone = [
        job("gpu alone", "gpu:0", "sync"),
        job("gpu alone, bf16", "gpu:0", "sync", "--amp"),
        job("cpu alone", "cpu", "sync", "--epochs", "1"),
    ]
    together = [
        job(f"{name}, {policy}", devices, policy)
        for name, devices in MIXES
        for policy in POLICIES
    ]
    amp = [
        job(f"gpu and cpu, bf16, {policy}", "gpu:0,cpu", policy, "--amp")
        for policy in ("sync", "async")
    ]
    coded = [
        job(f"{name}, {policy}, {codec}", devices, policy, "--codec", codec)
        for name, devices in MIXES
        for policy in ("cadence", "async")
        for codec in CODECS
    ]
    parts = [
        Case(f"{name}: {part}", devices, ("cuda_parts.py", part))
        for name, devices in mixes
        for part in PARTS
        if part != "ddp" or in_gloo or (name, devices) == TWO_GPUS
    ]
    return [*alone, *together, *amp, *coded, *parts]


def run_tests(kind: str) -> int:
    """The tests of devices, on this type of them; make's exit code."""
    command = ["make", "test-device", f"DEVICE={kind}"]
    return subprocess.run(command, cwd=HERE.parent, check=False).returncode


def shown(found: dict[str, object]) -> str:
    """A case's figures on a line."""
    if "error" in found:
        return "failed"
    rates = found.get("samples_per_s")
    if isinstance(rates, list):
        return f"{rates[-1]:10.0f} samples/s"
    times = [f"; {name} {value:.3g}" for name, value in found.items() if "_ms" in name]
    return f"differs from one process by {found['difference']:.1e}{''.join(times)}"


def main() -> int:
    """Runs all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--device", default="cuda", help="type of device, or cpu")
    parser.add_argument("--little", action="store_true", help="little work, no tests")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()
    kind, little = options.device, options.little
    count = torch.accelerator.device_count() if kind == choice.kind() else 0
    if kind != "cpu" and not count:
        print(f"torch can use no {kind} device here", file=sys.stderr)
        return 2
    device = choice.product_name(torch.device(kind))
    print(f"torch {torch.__version__}, {device}")
    tests_code = 0 if little or options.only else run_tests(kind)
    results: dict[str, dict[str, object]] = {}
    for case in cases(kind, has_two_gpus=count > 1):
        if options.only in case.name:
            found = run_case(case, kind, little)
            results[case.name] = found
            print(f"{case.name:40} {shown(found)}", flush=True)
            if "error" in found:
                print(found["error"], file=sys.stderr)
    if options.json is not None:
        record = {
            "torch": torch.__version__,
            "device": device,
            "tests": tests_code,
            "jobs": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    failed = any("error" in found for found in results.values())
    return 1 if failed or tests_code else 0


if __name__ == "__main__":
    sys.exit(main())
