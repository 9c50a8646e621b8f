"""The benchmark of all paths of an accelerator runs whole on the test device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.cuda_paths import cases
from tests import device as test_device


def run(*options: str) -> tuple[int, str, str]:
    """Exit code, table and errors."""
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda_paths", *options],
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_a_missing_device_is_named() -> None:
    assert run("--device", "mps") == (2, "", "torch can use no mps device here\n")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_every_path_runs_on_the_test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", test_device.autoloaded())
    monkeypatch.setenv("TEST_DEVICE_COLLECTIVES", "2")  # pipelines need two at a time
    code, table, errors = run("--device", test_device.NAME, "--little")
    assert code == 0, errors
    rows = table.splitlines()[1:]
    expected = [case.name for case in cases(test_device.NAME, has_two_gpus=True)]
    assert [row[:40].rstrip() for row in rows] == expected
    assert all("samples/s" in row or "differs from one" in row for row in rows)
