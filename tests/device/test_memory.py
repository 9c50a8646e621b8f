"""Device memory: untouchable by the host, in stream order, limited per device."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from tests.device import extension, has_streams, held, set_memory_bytes

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


def test_cache_is_given_back_before_memory_ends(device: torch.device) -> None:
    set_memory_bytes(0, 8 * MB)
    torch.accelerator.empty_cache()
    for size_mb in (3, 4, 5, 6):
        torch.zeros(size_mb * MB, dtype=torch.uint8, device=device)
    assert torch.accelerator.memory_reserved() <= 8 * MB


def test_memory_of_a_recorded_stream_is_awaited(device: torch.device) -> None:
    set_memory_bytes(0, 8 * MB)
    torch.accelerator.empty_cache()
    side = torch.Stream(device)
    values = torch.ones(5 * MB, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    with side:
        copy = values[:100] + 0
    values.record_stream(side)
    del values
    other = torch.zeros(5 * MB, dtype=torch.uint8, device=device)
    side.synchronize()
    assert int(copy.sum()) == 100
    assert int(other.sum()) == 0


def test_freed_memory_is_reused_on_its_stream_and_poisoned(
    device: torch.device,
) -> None:
    values = torch.ones(1000, device=device)
    address = values.data_ptr()
    with held():
        doubled = values * 2
        del values
        again = torch.empty(1000, device=device)
        assert again.data_ptr() == address
    assert float(doubled.sum()) == 2000.0
    assert bool(again.isnan().all())


def test_figures(device: torch.device) -> None:
    has_streams()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    values = torch.empty(4 * MB, dtype=torch.uint8, device=device)
    assert torch.accelerator.memory_allocated() == before + 4 * MB
    free, total = torch.accelerator.get_memory_info()
    assert total - free >= torch.accelerator.memory_reserved() >= before + 4 * MB
    del values
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + 4 * MB


def test_storage_grows_in_place(device: torch.device) -> None:
    values = torch.arange(4.0, device=device)
    values.resize_(8)
    assert values[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
