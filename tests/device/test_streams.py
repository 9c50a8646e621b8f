"""Streams, events and time: what is asynchronous, and that each class of race shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.device import (
    delays,
    extension,
    has_streams,
    held,
    host_operator_counts,
    kernel_count,
)


@pytest.fixture(autouse=True)
def streams(device: torch.device) -> None:
    has_streams()


def test_host_access_is_a_segmentation_fault() -> None:
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


@pytest.mark.parametrize("waits", [False, True])
def test_stale_without_wait_event(device: torch.device, waits: bool) -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream(device)
    source = torch.ones(100).pin_memory()
    target = torch.zeros(100, device=device)
    main.synchronize()
    with held(side):
        with side:
            target.copy_(source, non_blocking=True)
        if waits:
            main.wait_event(side.record_event())
        found = target.clone()
        if not waits:
            main.synchronize()
    assert float(found.sum()) == (100.0 if waits else 0.0)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_nan_without_record_stream(device: torch.device, is_recorded: bool) -> None:
    side = torch.Stream(device)
    source = torch.ones(100, device=device)
    result = torch.zeros(100, device=device)
    torch.accelerator.synchronize()
    with held(side):
        with side:
            result.copy_(source, non_blocking=True)
        if is_recorded:
            source.record_stream(side)
        del source
        torch.accelerator.current_stream().synchronize()
    side.synchronize()
    total = float(result.sum())
    assert total == 100.0 if is_recorded else total != total


def test_pinned_target_read_early(device: torch.device) -> None:
    source = torch.ones(100, device=device)
    target = torch.zeros(100, pin_memory=True)
    torch.accelerator.synchronize()
    with held():
        target.copy_(source, non_blocking=True)
        copied = torch.accelerator.current_stream().record_event()
        assert not copied.query()
        assert float(target.sum()) == 0.0
    copied.synchronize()
    assert float(target.sum()) == 100.0


def test_training_step_does_not_wait(device: torch.device) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3),
        torch.nn.BatchNorm2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 1),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.ones(4, 1, 4, 4, device=device)
    torch.accelerator.synchronize()
    before, waited = kernel_count(), host_operator_counts()
    with held():
        model(batch).sum().backward()
        optimizer.step()
        assert kernel_count() == before
    torch.accelerator.synchronize()
    assert kernel_count() > before + 20
    assert host_operator_counts() == waited


def kernels_ms(stream: torch.Stream, kernels: int) -> float:
    """Time of `kernels` on the stream by its events (ms)."""
    start, end = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
    with stream:
        values = torch.ones(1000, device=stream.device)
        start.record(stream)
        for _ in range(kernels):
            values.add_(1)
        end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end))


@pytest.mark.parametrize("pattern", ["copies late", "compute late", "random"])
def test_delays(device: torch.device, pattern: str) -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream(device)
    is_random = pattern == "random"
    with delays(pattern, 1000, seed=7 if is_random else 0):
        if pattern != "copies late":
            assert kernels_ms(main, 20) >= (4.0 if is_random else 20.0)
        if pattern != "compute late":
            assert kernels_ms(side, 20) >= (4.0 if is_random else 20.0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_fork_is_refused(device: torch.device) -> None:
    extension()
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
