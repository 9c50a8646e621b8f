"""`benchmarks/cuda_paths.py` runs; with ``--cpu``, for want of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.distributed


def run(folder: Path, only: str) -> dict[str, dict[str, Any]]:
    """The cases with this in their names."""
    record = folder / "record.json"
    command = [sys.executable, str(BENCHMARKS / "cuda_paths.py"), "--cpu"]
    done = subprocess.run(
        [*command, "--only", only, "--json", str(record)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    jobs: dict[str, dict[str, Any]] = json.loads(record.read_text())["jobs"]
    return jobs


@pytest.mark.slow
def test_a_part_is_compared_with_one_process(tmp_path: Path) -> None:
    found = run(tmp_path, "two ranks of one gpu: ddp")
    (part,) = found.values()
    assert part["part"] == "ddp"
    assert 0.0 < part["difference"] < 1e-12
