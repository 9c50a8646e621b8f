"""Whole runs on test devices, whose own backend sums: equal to one CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elche.devices.backends import own_backend
from tests import device as test_device
from tests.device import build

CASES = Path(__file__).parent / "cases"
TWO = ",".join(f"{test_device.KIND}:{index}" for index in range(2))
MIXED = f"{test_device.KIND}:0,cpu"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if test_device.KIND != test_device.NAME:
        return
    if compiler := build.missing_compiler():
        pytest.skip(f"the test device needs {compiler} to be built")
    build.built()


def run(
    folder: Path, devices: str, script: str, *arguments: str, **environment: str
) -> list[Any]:
    """What the ranks of `elche run` have left in the folder, in rank order."""
    for index in range(devices.count(test_device.KIND)):
        test_device.device_name(index)
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


@pytest.fixture(scope="module", params=["sync", "cadence", "async"])
def on_cpu(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A policy, and its training on one CPU, or on two where that depends on it."""
    devices = "cpu" if request.param == "sync" else "cpu,cpu"
    folder = tmp_path_factory.mktemp("alone")
    return request.param, run(folder, devices, "trains.py", request.param)[0]


@pytest.mark.parametrize("devices", [TWO, MIXED])
def test_two_devices_train_as_cpus(
    device: torch.device, tmp_path: Path, on_cpu: Any, devices: str
) -> None:
    policy, expected = on_cpu
    own = own_backend(device).upper() if devices == TWO else ""
    found = run(tmp_path, devices, "trains.py", policy)
    assert [each["transport"] for each in found] == [own or "gloo"] * 2
    assert sum(each["samples"] for each in found) == 512 * 3
    assert found[0]["parameters"] == found[1]["parameters"]
    for one, other in zip(found[0]["parameters"], expected["parameters"], strict=True):
        assert one == pytest.approx(other, abs=2e-5)


def test_stages_on_two_devices_equal_one(tmp_path: Path) -> None:
    # Both directions are under way at once, each by a communicator of its own. On a
    # device that runs one collective at a time, as NCCL may have it, they hang.
    for each in run(tmp_path, TWO, "pipes.py", TEST_DEVICE_COLLECTIVES="2"):
        assert each["found"] == pytest.approx(each["expected"], rel=1e-5)


@pytest.mark.parametrize("kind", ["elche", "torch"])
def test_wrapped_models_sum_on_their_devices(tmp_path: Path, kind: str) -> None:
    first, second = run(tmp_path, TWO, "wraps.py", kind)
    assert first["difference"] == second["difference"] < 1e-5
