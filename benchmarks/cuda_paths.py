"""Every CUDA path in one call: tests, then rank mixes under each policy, one table.

    python benchmarks/cuda_paths.py --json cuda.json

Runs the tests that need CUDA (copy streams, prefetch), and trains `cuda_job.py` on one
GPU alone, on the CPU alone, on two ranks of one GPU (gloo), on a GPU beside a CPU rank,
each under every policy, and with mixed precision. Needs one CUDA device; ends with code
2 where there is none, with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
POLICIES = ("sync", "cadence", "async", "auto")
JOB_TIMEOUT_S = 150.0


def run_job(devices: str, policy: str, *job_options: str) -> dict[str, object]:
    """Trains once; the job's figures, or what went wrong."""
    command = [sys.executable, "-m", "elche.cli", "run", "--devices", devices]
    command += [str(HERE / "cuda_job.py"), *job_options]
    environment = {**os.environ, "ELCHE_POLICY": policy, "OMP_NUM_THREADS": "4"}
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
    return {**json.loads(figures[-1]), "wall_s": time.monotonic() - started_s}


def cases() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(name, devices, policy, options of the job)."""
    alone = [
        ("gpu alone", "cuda:0", "sync", ()),
        ("gpu alone, bf16", "cuda:0", "sync", ("--amp",)),
        ("cpu alone", "cpu", "sync", ("--epochs", "1")),
    ]
    together = [
        (f"{name}, {policy}", devices, policy, ())
        for name, devices in (
            ("two ranks of one gpu", "cuda:0,cuda:0"),
            ("gpu and cpu", "cuda:0,cpu"),
        )
        for policy in POLICIES
    ]
    amp = [
        (f"gpu and cpu, bf16, {policy}", "cuda:0,cpu", policy, ("--amp",))
        for policy in ("sync", "async")
    ]
    return [*alone, *together, *amp]


def run_tests() -> int:
    """The tests that need CUDA; pytest's exit code."""
    tests = HERE.parent / "tests"
    files = [str(path) for path in tests.rglob("test_*cuda*.py")]
    command = [sys.executable, "-m", "pytest", "-q", *files]
    return subprocess.run(command, cwd=HERE.parent, check=False).returncode


def main() -> int:
    """Runs all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this machine has no CUDA device", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    tests_code = run_tests()
    results: dict[str, dict[str, object]] = {}
    for name, devices, policy, job_options in cases():
        results[name] = found = run_job(devices, policy, *job_options)
        rates = found.get("samples_per_s")
        last = f"{rates[-1]:10.0f} samples/s" if isinstance(rates, list) else "failed"
        print(f"{name:34} {last}", flush=True)
        if "error" in found:
            print(found["error"], file=sys.stderr)
    if options.json is not None:
        record = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(0),
            "tests": tests_code,
            "jobs": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    failed = any("error" in found for found in results.values())
    return 1 if failed or tests_code not in (0, 5) else 0


if __name__ == "__main__":
    sys.exit(main())
