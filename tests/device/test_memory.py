"""Device memory: untouchable by the host, in stream order, limited per device."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from tests.device import extension, set_memory_bytes

MB = 2**20


def test_host_access_is_a_segmentation_fault(device: torch.device) -> None:
    assert extension()
    script = (
        "import ctypes, resource, torch; from tests import device\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "values = torch.ones(4, device=device.register())\n"
        "torch.accelerator.synchronize()\n"
        "ctypes.string_at(values.data_ptr(), 4)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=200)
    assert ended.returncode == -signal.SIGSEGV


def test_out_of_memory_by_the_limit_of_each_device(device: torch.device) -> None:
    set_memory_bytes(0, 8 * MB)
    set_memory_bytes(1, 64 * MB)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 16777216"):
        torch.empty(16 * MB, dtype=torch.uint8, device=device)
    torch.empty(16 * MB, dtype=torch.uint8, device="tdev:1")


def test_storage_grows_in_place(device: torch.device) -> None:
    values = torch.arange(4.0, device=device)
    values.resize_(8)
    assert values[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
