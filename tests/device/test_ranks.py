"""Whole runs on test devices, whose own backend sums: equal to one CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device import build

CASES = Path(__file__).parent / "cases"
TWO = "tdev:0,tdev:1"
MIXED = "tdev:0,cpu"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if compiler := build.missing_compiler():
        pytest.skip(f"the test device needs {compiler} to be built")
    build.built()


def run(
    folder: Path, devices: str, script: str, *arguments: str, **environment: str
) -> list[Any]:
    """What the ranks of `elche run` have left in the folder, in rank order."""
    command = [sys.executable, "-m", "elche", "run", "--devices", devices]
    done = subprocess.run(
        [*command, str(CASES / script), *arguments, str(folder)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [each.read_text() for each in sorted(folder.glob("rank*.json"))]
    return [json.loads(each) for each in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same training on one CPU."""
    return run(tmp_path_factory.mktemp("alone"), "cpu", "trains.py", "sync")[0]


@pytest.mark.parametrize(("devices", "transport"), [(TWO, "TDCCL"), (MIXED, "gloo")])
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_two_devices_train_as_one(
    tmp_path: Path, alone: Any, policy: str, devices: str, transport: str
) -> None:
    found = run(tmp_path, devices, "trains.py", policy)
    assert [each["transport"] for each in found] == [transport] * 2
    assert sum(each["samples"] for each in found) == alone["samples"]
    assert found[0]["parameters"] == found[1]["parameters"]
    if policy == "sync":
        for one, other in zip(found[0]["parameters"], alone["parameters"], strict=True):
            assert one == pytest.approx(other, abs=2e-6)
    assert found[0]["loss"] == pytest.approx(alone["loss"], rel=0.2)


def test_stages_on_two_devices_equal_one(tmp_path: Path) -> None:
    # Both directions are under way at once, each by a communicator of its own. On a
    # device that runs one collective at a time, as NCCL may have it, they hang.
    for each in run(tmp_path, TWO, "pipes.py", TEST_DEVICE_COLLECTIVES="2"):
        assert each["found"] == pytest.approx(each["expected"], rel=1e-5)


@pytest.mark.parametrize("kind", ["elche", "torch"])
def test_wrapped_models_sum_on_their_devices(tmp_path: Path, kind: str) -> None:
    first, second = run(tmp_path, TWO, "wraps.py", kind)
    assert first["difference"] == second["difference"] < 1e-5
