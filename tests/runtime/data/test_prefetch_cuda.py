"""Prefetching on a real CUDA device: streams, lifetimes and memory as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elche.devices.memory import MemoryReading, read_memory
from elche.runtime.data.prefetch import DevicePrefetcher
from elche.runtime.data.transfer import CopyStream

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"
)

MB = 2**20
LONG_SLEEP_CYCLES = 1_500_000_000  # about a second


def roomy_memory() -> MemoryReading:
    """Says that there is room, and how large a step is, so that the depth is two."""
    return MemoryReading(2**40, 2**39, 2**30, 2**31)


@pytest.fixture
def device() -> Iterator[torch.device]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def numbered(count: int, nbytes: int = MB) -> Callable[[], tuple[int, Any] | None]:
    """Batches filled with their number, in fresh pageable memory."""
    numbers = iter(range(count))

    def next_batch() -> tuple[int, Any] | None:
        number = next(numbers, None)
        if number is None:
            return None
        return number, torch.full((nbytes // 4,), float(number))

    return next_batch


def roomy(
    next_batch: Callable[[], tuple[int, Any] | None], device: torch.device
) -> DevicePrefetcher[int]:
    copies = CopyStream(device)
    return DevicePrefetcher(next_batch, device, copies, roomy_memory)


def take(ahead: DevicePrefetcher[int]) -> tuple[int, Any]:
    got = ahead.take()
    assert got is not None
    return got


def warm_up(ahead: DevicePrefetcher[int]) -> None:
    """Takes until two batches are held ahead and both ways of copying were tried."""
    for _ in range(12):
        _, data = take(ahead)
        data.sum()
    torch.cuda.synchronize()
    assert ahead.depth == 2


def test_a_slow_device_reads_what_it_was_given(device: torch.device) -> None:
    """Batches are dropped at once, while the kernels that read them are queued."""
    ahead, sums = roomy(numbered(80, 4 * MB), device), []
    while (got := ahead.take()) is not None:
        torch.cuda._sleep(3_000_000)
        sums.append(got[1].double().sum())
        del got
    assert [s.item() for s in sums] == [float(n) * MB for n in range(80)]


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_is_not_reused_while_it_is_read(
    device: torch.device, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control shows that it would be, if the allocator were not told."""
    ahead = roomy(numbered(40, 4 * MB), device)
    warm_up(ahead)
    if not keeps:
        monkeypatch.setattr(CopyStream, "keep", lambda self, tensor: None)
    torch.cuda._sleep(LONG_SLEEP_CYCLES)
    addresses = []
    for _ in range(20):
        _, data = take(ahead)
        data.mul_(2)
        addresses.append(data.data_ptr())
        del data
    busy = torch.cuda.Event()
    busy.record()
    assert not busy.query()
    reused = len(set(addresses)) < len(addresses)
    assert reused is not keeps


def test_copies_run_beside_the_training(device: torch.device) -> None:
    ahead = roomy(numbered(40, 4 * MB), device)
    warm_up(ahead)
    torch.cuda._sleep(LONG_SLEEP_CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    for _ in range(4):
        take(ahead)
    copy = ahead._held[-1].copy
    assert copy is not None
    fence: Any = copy.fence
    fence.synchronize()
    assert not busy.query()  # neither the copies nor the host waited for the training


@pytest.mark.parametrize("pin", [True, False])
def test_a_copy_reads_pinned_memory_if_asked(device: torch.device, pin: bool) -> None:
    copies = CopyStream(device)
    host = [torch.arange(1000.0), torch.arange(7)]
    copied = copies.copy(host, pin)
    assert [tensor.is_pinned() for tensor in copied.source] == [pin, pin]
    copies.wait(copied.fence)
    assert copied.data[0].cpu().equal(host[0])
    assert copied.data[1].cpu().equal(host[1])
    already = host[0].pin_memory()
    assert copies.copy(already, pin).source.data_ptr() == already.data_ptr()
    torch.cuda.synchronize()
    assert copied.fence.query()


def test_a_full_device_lowers_the_depth_and_loses_nothing(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    batch_bytes = 64 * MB
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert free_bytes > 8 * batch_bytes
    reserved_bytes = torch.cuda.memory_reserved()
    room = reserved_bytes + 2.5 * batch_bytes
    torch.cuda.set_per_process_memory_fraction(room / total_bytes)
    ahead = roomy(numbered(6, batch_bytes), device)
    kept = [take(ahead)[1], take(ahead)[1]]  # with the third there is no room
    assert ahead.depth == 0
    assert [data[-1].item() for data in kept] == [0.0, 1.0]
    kept.clear()
    for expected in range(2, 6):
        number, data = take(ahead)
        assert number == expected
        assert data.eq(expected).all().item()
        del data
    assert ahead.take() is None
    assert [record.name for record in caplog.records] == ["elche.runtime.data.prefetch"]


def test_the_probe_counts_cached_memory_as_free(device: torch.device) -> None:
    before = read_memory(device)
    block = torch.empty(256 * MB, dtype=torch.uint8, device=device)
    during = read_memory(device)
    del block
    after = read_memory(device)
    assert before.total_bytes == torch.cuda.mem_get_info()[1]
    assert during.active_bytes - before.active_bytes == 256 * MB
    assert before.free_bytes - during.free_bytes >= 256 * MB
    assert abs(after.free_bytes - before.free_bytes) < 32 * MB
    assert after.peak_bytes >= during.active_bytes
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert read_memory(torch.device("cuda")).free_bytes <= 0.25 * before.total_bytes


def test_a_mostly_free_device_holds_batches_and_the_set(device: torch.device) -> None:
    """The reference's gauge read used for free: here it never prefetched."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert free_bytes > 0.5 * total_bytes
    torch.cuda.reset_peak_memory_stats()
    next_batch = numbered(20, 1024 * 256)
    ahead = DevicePrefetcher[int].on(next_batch, device)
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 1))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(10):
        tag, data = take(ahead)
        assert tag == number
        model(data.view(-1, 256)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak_bytes = ahead._peak.value_bytes
    assert peak_bytes is not None
    assert 256 * 2048 * 4 < peak_bytes < 0.1 * total_bytes
    assert ahead.depth == 2
