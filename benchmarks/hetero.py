"""`elche bench hetero` for other benchmarks: run, and its figures read back.

With ``--link-mbit`` it is `benchmarks.links`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def measure(
    args: argparse.Namespace, *more: str, others: Sequence[str] = ()
) -> dict[str, Any]:
    """The figures of one run: devices alone, the control, and elche's policies.

    Args:
        args: with speeds, policies, seconds, solo_seconds, ms_per_sample and model.
        *more: further words of the command.
        others: contenders beside those.
    """
    ranks = len(args.speeds.split(","))
    names = [f"solo-{rank}" for rank in range(ranks)] + ["indep", *others]
    names += [f"elche-{policy}" for policy in args.policies.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "elche", "bench", "hetero"]
        if "--link-mbit" in more:
            command[2:] = ["benchmarks.links"]
        command += ["--speeds", args.speeds, "--seconds", str(args.seconds)]
        command += ["--ms-per-sample", str(args.ms_per_sample), "--model", args.model]
        command += ["--solo-seconds", str(args.solo_seconds), "--time-capped"]
        command += ["--contenders", ",".join(names), "--allow-noise", *more]
        command += ["--json", str(out)]
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)
        found: dict[str, Any] = json.loads(out.read_text())
    return found
