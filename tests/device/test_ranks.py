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
SLOW = pytest.mark.slow


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
    if test_device.KIND != test_device.NAME:  # which has as many as it is asked for
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
    return request.param, run(folder, devices, "trains.py", request.param, "")[0]


def check(found: list[Any], expected: Any = None) -> None:
    """Every sample was trained once per epoch, to one model, perhaps a known one."""
    assert [sum(pair) for pair in zip(*each_epoch(found), strict=True)] == [512] * 3
    assert found[0]["parameters"] == found[1]["parameters"]
    if expected is None:
        return
    for one, other in zip(found[0]["parameters"], expected["parameters"], strict=True):
        assert one == pytest.approx(other, abs=2e-5)


def each_epoch(found: list[Any]) -> list[list[int]]:
    return [each["samples"] for each in found]


@pytest.mark.parametrize("devices", [TWO, MIXED])
def test_two_devices_train_as_cpus(
    device: torch.device, tmp_path: Path, on_cpu: Any, devices: str
) -> None:
    policy, expected = on_cpu
    own = own_backend(device).upper() if devices == TWO else ""
    found = run(
        tmp_path, devices, "trains.py", policy, "", TEST_DEVICE_ELEMENT_NS="1:200"
    )
    assert [each["transport"] for each in found] == [own or "gloo"] * 2
    check(found, expected)


@pytest.mark.parametrize(
    ("devices", "schedule", "costs"),
    [
        pytest.param(f"{test_device.KIND}:1", "1f1b", "", marks=SLOW),
        (TWO, "1f1b", "measure"),
        # Ranks send in a circle.
        (f"{TWO},{test_device.KIND}:2", "interleaved-1f1b", ""),
    ],
)
def test_stages_on_devices_equal_one(
    tmp_path: Path, devices: str, schedule: str, costs: str
) -> None:
    # The device runs one collective at a time, as NCCL may have it.
    count = devices.count(",") + 1
    environment = {"TEST_DEVICE_COUNT": str(max(2, count))}
    found = run(tmp_path, devices, "pipes.py", schedule, costs, **environment)
    assert len(found) == count
    for each, device in zip(found, devices.split(","), strict=True):
        assert each["found"] == pytest.approx(each["expected"], rel=1e-5)
        assert {*each["devices"]} == {device}


@pytest.mark.parametrize("devices", [TWO, pytest.param(MIXED, marks=SLOW)])
def test_shares_follow_the_speed(tmp_path: Path, on_cpu: Any, devices: str) -> None:
    if test_device.KIND != test_device.NAME:
        pytest.skip("only the test device has a speed that is set")
    policy, expected = on_cpu
    found = run(
        tmp_path, devices, "trains.py", policy, "timed",
        TEST_DEVICE_ELEMENT_NS="0:100,1:10000",
    )  # fmt: skip
    check(found, expected if policy == "sync" else None)
    fast, slow = map(sum, each_epoch(found))  # an epoch has few windows
    assert fast > 2 * slow, each_epoch(found)


@pytest.mark.parametrize("kind", ["elche", "torch"])
def test_wrapped_models_sum_on_their_devices(tmp_path: Path, kind: str) -> None:
    first, second = run(tmp_path, TWO, "wraps.py", kind)
    assert first["difference"] == second["difference"] < 1e-5


@pytest.mark.slow
def test_auto_measures_devices_and_trains_on(tmp_path: Path) -> None:
    speeds = {"TEST_DEVICE_ELEMENT_NS": "0:100,1:5000"}
    check(run(tmp_path, TWO, "trains.py", "auto", "timed", **speeds))
