"""Every CUDA path in one call: tests, then rank mixes under each policy, one table.

    python benchmarks/cuda_paths.py --json cuda.json
    python benchmarks/cuda_paths.py --cpu                 the same script without a GPU

Runs the tests that need CUDA (copy streams, prefetch), and trains `cuda_job.py` on one
GPU alone, on the CPU alone, on two ranks of one GPU (gloo), on a GPU beside a CPU rank,
each under every policy, with mixed precision, and with each codec. Then the parts for
loops of one's own (`cuda_parts.py`: DistributedDataParallel, SyncBatchNorm, Replica,
Pipeline, and large messages between its stages) on both mixes, against one process on
the CPU; with two GPUs on both of them as well, through NCCL. Needs one CUDA device;
ends with code 2 where there is none, with 1 if anything failed. ``--cpu`` puts CPU
ranks in the GPU's place, with little work and no tests: that the script runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
POLICIES = ("sync", "cadence", "async", "auto")
CODECS = ("bf16", "int8", "int4")
PARTS = ("ddp", "sync_batch_norm", "replica", "pipeline", "messages")
MIXES = (("two ranks of one gpu", "cuda:0,cuda:0"), ("gpu and cpu", "cuda:0,cpu"))
TWO_GPUS = ("two gpus", "cuda:0,cuda:1")
WORST_DIFFERENCE = 1e-9
"""Of a part in float64; devices sum in other orders."""
JOB_TIMEOUT_S = 150.0
LITTLE_WORK = ("--samples", "256", "--epochs", "1", "--width", "4", "--workers", "0")


@dataclass(frozen=True)
class Case:
    """One call of `elche run`.

    Attributes:
        name: in the table.
        devices: of the ranks.
        script: beside this file, and its options.
        environment: what to set for it.
    """

    name: str
    devices: str
    script: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def run_case(case: Case) -> dict[str, object]:
    """Runs once; the script's figures, or what went wrong."""
    script, *options = case.script
    command = [sys.executable, "-m", "elche", "run", "--devices", case.devices]
    command += [str(HERE / script), *options]
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


def cases() -> list[Case]:
    """What is run on a machine with one GPU, and what on one with more."""
    alone = [
        job("gpu alone", "cuda:0", "sync"),
        job("gpu alone, bf16", "cuda:0", "sync", "--amp"),
        job("cpu alone", "cpu", "sync", "--epochs", "1"),
    ]
    together = [
        job(f"{name}, {policy}", devices, policy)
        for name, devices in MIXES
        for policy in POLICIES
    ]
    amp = [
        job(f"gpu and cpu, bf16, {policy}", "cuda:0,cpu", policy, "--amp")
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
        for name, devices in (*MIXES, *([TWO_GPUS] if has_two_gpus() else []))
        for part in PARTS
    ]
    return [*alone, *together, *amp, *coded, *parts]


def has_two_gpus() -> bool:
    """Whether NCCL has two devices to go between."""
    return torch.cuda.device_count() > 1


def on_cpu(case: Case) -> Case:
    """The same with CPU ranks only, and little work."""
    script = tuple(each.replace("cuda:0", "cpu") for each in case.script)
    if script[0] == "cuda_job.py":
        script = (*script, *LITTLE_WORK)
    return replace(case, devices=re.sub(r"cuda:\d", "cpu", case.devices), script=script)


def run_tests() -> int:
    """The tests that need CUDA; pytest's exit code."""
    tests = HERE.parent / "tests"
    files = [str(path) for path in tests.rglob("test_*cuda*.py")]
    command = [sys.executable, "-m", "pytest", "-q", *files]
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
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("this machine has no CUDA device", file=sys.stderr)
        return 2
    device = "CPU ranks" if options.cpu else torch.cuda.get_device_name(0)
    print(f"torch {torch.__version__}, {device}")
    tests_code = 0 if options.cpu or options.only else run_tests()
    results: dict[str, dict[str, object]] = {}
    for case in cases():
        if options.only in case.name:
            found = run_case(on_cpu(case) if options.cpu else case)
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
    return 1 if failed or tests_code not in (0, 5) else 0


if __name__ == "__main__":
    sys.exit(main())
