"""Registers the test device, for the whole process: only `make test-device` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import device as test_device
from tests.device import build

FOLDER = Path(__file__).parent
MEMORY_BYTES = 1 << 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if test_device.KIND != test_device.NAME:
        return
    if not all(item.path.is_relative_to(FOLDER) for item in items):
        reason = "the test device is torch's for the whole process: make test-device"
    elif sys.platform != "linux":
        reason = "the test device maps its memory as only Linux can"
    elif compiler := build.missing_compiler():
        reason = f"{compiler}, which builds the test device, is not installed"
    for item in items:
        if reason and item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """The first device, idle, with no delays, no kernel times and all its memory."""
    place = test_device.register()
    if place.type != "cpu":
        torch.accelerator.set_device_index(place)  # runs in this process may change it
    yield place
    if place.type != "cpu":
        torch.accelerator.synchronize()
    if place.type != test_device.NAME:
        return
    test_device.set_delays("none")
    for each in range(torch.accelerator.device_count()):
        test_device.set_speed(each, 0.0)
        test_device.set_memory_bytes(each, MEMORY_BYTES)
        torch.accelerator.synchronize(each)


@pytest.fixture(params=["none", "copies late", "compute late", "random"])
def delayed(request: pytest.FixtureRequest, device: torch.device) -> Iterator[str]:
    """Kernels are late, by up to a millisecond, in each pattern in turn."""
    pattern: str = request.param
    with test_device.delays(pattern, 1000, seed=7 if pattern == "random" else 0):
        yield pattern
