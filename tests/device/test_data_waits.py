"""Batches prefetched to the device: in order, whole, beside the training."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from elche.devices.memory import MemoryReading
from elche.runtime.data.prefetch import DevicePrefetcher
from elche.runtime.data.transfer import CopyStream
from tests.device import held, set_memory_bytes

MB = 2**20
ELEMENTS = MB // 4
DEADLINE_S = 60.0


def numbered(
    count: int, *, is_pinned: bool = False
) -> Callable[[], tuple[int, torch.Tensor] | None]:
    """Batches of 1 MB, each filled with its number plus one."""
    numbers = iter(range(count))

    def next_batch() -> tuple[int, torch.Tensor] | None:
        number = next(numbers, None)
        if number is None:
            return None
        batch = torch.full((ELEMENTS,), number + 1.0)
        return number, batch.pin_memory() if is_pinned else batch

    return next_batch


def roomy_memory() -> MemoryReading:
    """Figures of a device for which the depth is two."""
    return MemoryReading(2**40, 2**39, 2**30, 2**31)


def roomy(count: int, device: torch.device) -> tuple[DevicePrefetcher[int], CopyStream]:
    copies = CopyStream(device)
    batches = numbered(count)
    return DevicePrefetcher(batches, device, copies, roomy_memory), copies


def take(ahead: DevicePrefetcher[int]) -> torch.Tensor:
    got = ahead.take()
    assert got is not None
    data: torch.Tensor = got[1]
    return data


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.usefixtures("delayed")
def test_batches_are_whole(device: torch.device, is_pinned: bool) -> None:
    """Each is dropped at once, while kernels that read it are queued."""
    ahead = DevicePrefetcher[int].on(numbered(24, is_pinned=is_pinned), device)
    found: list[torch.Tensor] = []
    depths = set()
    while (got := ahead.take()) is not None:
        number, data = got
        assert number == len(found)
        for _ in range(2):
            data = data * 2
        found.append(data.sum())
        depths.add(ahead.depth)
        del got, data
    assert [float(each) / ELEMENTS / 4 for each in found] == [*range(1, 25)]
    assert depths >= {1, 2}  # careful until a step's peak is known


def test_copies_run_beside_the_training(device: torch.device) -> None:
    ahead, _ = roomy(20, device)
    for _ in range(6):
        take(ahead)
    with held():
        for _ in range(3):
            take(ahead)
        copy = ahead._held[-1].copy
        assert copy is not None
        until_s = time.monotonic() + DEADLINE_S
        while not copy.fence.query():
            assert time.monotonic() < until_s, "the copy waits for the training"
            time.sleep(0.001)


def test_sources_are_kept_until_they_are_copied(device: torch.device) -> None:
    ahead, copies = roomy(20, device)
    for _ in range(6):
        take(ahead)
    torch.accelerator.synchronize()
    with held(copies._stream):
        for _ in range(5):
            take(ahead)
        kept = len(ahead._being_read)
    assert kept == 3  # two of the five had been copied before
    torch.accelerator.synchronize()
    take(ahead)
    assert len(ahead._being_read) == 1


@pytest.mark.usefixtures("delayed")
def test_full_memory_lowers_the_depth_and_loses_nothing(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    torch.accelerator.empty_cache()
    ahead, _ = roomy(10, device)
    set_memory_bytes(0, torch.accelerator.memory_reserved() + 2 * MB + MB // 2)
    kept = [take(ahead) for _ in range(2)]  # there is no room for a third
    assert ahead.depth < 2
    assert [float(each[-1]) for each in kept] == [1.0, 2.0]
    kept.clear()
    for number in range(2, 10):
        data = take(ahead)
        assert data.eq(number + 1.0).all()
        del data
    assert ahead.take() is None
    assert [record.name for record in caplog.records] == ["elche.runtime.data.prefetch"]


def test_gauge_follows_the_memory_that_is_left(device: torch.device) -> None:
    torch.accelerator.empty_cache()
    set_memory_bytes(0, torch.accelerator.memory_reserved() + 40 * MB)
    ahead = DevicePrefetcher[int].on(numbered(100), device)

    def step() -> int:
        data = take(ahead)
        (data * 2).sum()
        torch.accelerator.synchronize()
        return ahead.depth

    assert [step() for _ in range(6)][-1] == 2
    used = torch.empty(34 * MB, dtype=torch.uint8, device=device)
    assert [step() for _ in range(40)][-1] == 0
    del used
    assert [step() for _ in range(40)][-1] == 2
