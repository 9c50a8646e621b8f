"""Batches copied ahead to the device: order, waits, lifetimes and memory."""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from elche.cadence.prefetch_gauge import MAX_DEPTH
from elche.devices.memory import MemoryReading
from elche.runtime.data.prefetch import (
    DevicePrefetcher,
    most_ahead,
)
from elche.runtime.data.transfer import Copy, CopyStream
from tests.device import held

WIDTH = 1 << 14
BATCH_BYTES = 4 * WIDTH
MB = 2**20


@dataclass
class Memory:
    """Figures of a device: its size, what the training leaves, what a step takes."""

    total_bytes: int = 100 * BATCH_BYTES
    free_bytes: int = 90 * BATCH_BYTES
    step_bytes: int = 10 * BATCH_BYTES

    def __call__(self) -> MemoryReading:
        active = self.total_bytes - self.free_bytes
        peak = active + self.step_bytes
        return MemoryReading(self.total_bytes, self.free_bytes, active, peak)


class Source:
    """Loaded batches by number; None pauses. Holds none that it has yielded."""

    def __init__(self, *script: int | None, width: int = WIDTH) -> None:
        self.script, self.width, self.yielded = deque(script), width, 0
        self.weak: dict[int, weakref.ref[torch.Tensor]] = {}

    def __call__(self) -> tuple[int, Any] | None:
        number = self.script.popleft() if self.script else None
        if number is None:
            return None
        batch = torch.full((self.width,), float(number)).pin_memory()
        self.weak[number] = weakref.ref(batch)
        self.yielded += 1
        return number, batch

    @property
    def alive(self) -> list[int]:
        gc.collect()
        return [number for number, each in self.weak.items() if each() is not None]


def prefetcher(source: Any, device: torch.device) -> DevicePrefetcher[Any]:
    return DevicePrefetcher(source, device, CopyStream(device), Memory())


def take_all(ahead: DevicePrefetcher[Any]) -> list[int]:
    """Takes until nothing comes; checks each batch when all are taken."""
    bounds = []
    while (got := ahead.take()) is not None:
        bounds.append((got[0], got[1].amin(), got[1].amax()))
        del got
    assert all(low.item() == tag == high.item() for tag, low, high in bounds)
    return [tag for tag, *_ in bounds]


def test_copies_run_ahead_of_use_by_the_depth(device: torch.device) -> None:
    source = Source(*range(40))
    ahead = prefetcher(source, device)
    for taken in range(1, 30):
        ahead.take()
        assert source.yielded <= taken + 2
        assert ahead.has_batch == (taken > 1)
    assert ahead.depth == MAX_DEPTH == 2 == most_ahead(device)
    assert source.yielded == 29 + 2
    assert take_all(ahead) == [*range(29, 40)]


def test_the_first_batch_does_not_wait_for_a_second(device: torch.device) -> None:
    source = Source(*range(5), *[None] * 3, *range(5, 15))
    ahead = prefetcher(source, device)
    ahead.take()
    assert source.yielded == 1
    ahead.take()
    assert source.yielded == 3
    while ahead.take() is not None:
        pass
    assert (source.yielded, ahead.depth) == (5, 2)
    yielded = []
    for _ in range(4):
        ahead.take()
        yielded.append(source.yielded - 5)
    assert yielded == [1, 3, 5, 6]  # after the pause: at most two at once, then one


def test_a_source_lives_until_its_copy_is_done(device: torch.device) -> None:
    source = Source(0, 1, 2, 3, 4, 5, None, 7, 8)
    ahead = prefetcher(source, device)
    stream: Any = ahead._copies
    with held(stream._stream):
        for _ in range(4):
            ahead.take()
        assert source.alive == [1, 2, 3, 4, 5]  # taken or not: none is copied
        ahead.discard()
        assert not ahead.has_batch
        assert source.alive == [1, 2, 3, 4, 5]
        assert ahead.take() is None
    stream._stream.synchronize()
    assert take_all(ahead) == [7, 8]
    assert not {*range(6)} & {*source.alive}


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_copy_reads_pinned_memory_if_asked(
    device: torch.device, is_pinned: bool
) -> None:
    copies = CopyStream(device)
    host = [torch.arange(1000.0), torch.arange(7)]
    copied = copies.copy(host, is_pinned)
    assert [tensor.is_pinned() for tensor in copied.source] == [is_pinned] * 2
    copies.wait(copied.fence)
    assert all(map(torch.equal, [each.cpu() for each in copied.data], host))
    already = host[0].pin_memory()
    again = copies.copy(already, is_pinned)
    assert again.source.data_ptr() == already.data_ptr()
    copies.wait(again.fence)


def test_the_times_of_a_take(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, copy = [0.0], CopyStream.copy

    def slow(self: CopyStream, data: Any, pin: bool) -> Copy:
        now_s[0] += 0.125
        return copy(self, data, pin)

    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(CopyStream, "copy", slow)
    ahead, found = prefetcher(Source(*range(30)), device), []
    for _ in range(3):
        ahead.take()
        found.append(ahead.transfer_s)
    assert found == [0.0, 0.25, 0.125]


def test_what_only_its_own_to_can_move_is_moved_when_yielded(
    device: torch.device,
) -> None:
    class Graph:
        moved_to: torch.device | None = None

        def to(self, device: torch.device) -> Graph:
            self.moved_to = device
            return self

    graphs = iter([(number, Graph()) for number in range(5)])
    ahead = prefetcher(lambda: next(graphs, None), device)
    for number in range(5):
        tag, graph = ahead.take()  # type: ignore[misc]
        assert (tag, graph.moved_to, ahead.has_batch) == (number, device, False)
