"""The device in child processes: configured by variables, refused after a fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests import device as test_device


@pytest.fixture(autouse=True)
def only_here(device: torch.device) -> None:
    test_device.extension()


def test_environment_configures_a_child(device: torch.device) -> None:
    script = (
        "import torch\n"
        "print(torch.accelerator.device_count())\n"
        "print(torch.accelerator.get_memory_info(1))\n"
        "ends = []\n"
        "for index in range(2):\n"
        "    marks = [torch.Event('tdev', enable_timing=True) for _ in range(2)]\n"
        "    torch.accelerator.set_device_index(index)\n"
        "    values = torch.ones(1000, device='tdev')\n"
        "    marks[0].record()\n"
        "    values.add_(1)\n"
        "    marks[1].record()\n"
        "    marks[1].synchronize()\n"
        "    ends.append(marks[0].elapsed_time(marks[1]))\n"
        "print(ends[0] >= 1, ends[1] >= 4 + 1 + 2)\n"
    )
    variables = {
        "PYTHONPATH": test_device.autoloaded(),
        "TEST_DEVICE_COUNT": "3",
        "TEST_DEVICE_KERNEL_US": "0:1000,1:4000",
        "TEST_DEVICE_ELEMENT_NS": "1:1000",
        "TEST_DEVICE_MEMORY_MB": "1:64",
        "TEST_DEVICE_DELAYS": "compute late:2000",
    }
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    free, total = 64 * 2**20, 64 * 2**20
    assert ended.stdout.splitlines() == ["3", f"({free}, {total})", "True True"], ended


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_fork_is_refused(device: torch.device) -> None:
    torch.ones(3, device=device)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.manual_seed(0)  # skips the device
            torch.ones(3, device=device)
        except RuntimeError as error:
            code = 7 if "cannot be used in a forked process" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_random_delays_need_a_seed(device: torch.device) -> None:
    with pytest.raises(ValueError, match="need a seed"):
        test_device.set_delays("random", 100)
