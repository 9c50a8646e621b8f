"""Batches copied ahead: order of copies, waits and lifetimes, with a device in mind.

The copies of `FakeCopies` happen when the test says so, as a stream's do: until then
the tensors on the "device" hold -1. Its device is the CPU's memory, but the prefetcher
is told another one, so that it does not pass batches through.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elche.cadence.prefetch_gauge import MAX_DEPTH
from elche.devices.memory import MemoryReading, read_memory
from elche.runtime.data.leased_data import BatchFeed
from elche.runtime.data.positions import IndexBatch
from elche.runtime.data.prefetch import (
    GAUGE_EVERY_BATCHES,
    WARM_BATCHES,
    DevicePrefetcher,
    most_ahead,
)
from elche.runtime.data.transfer import Copy, map_batch

CPU = torch.device("cpu")
SAMPLES, WIDTH = 4, 8
BATCH_BYTES = SAMPLES * WIDTH * 4
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class FakeFence:
    number: int
    passed: bool = False

    def query(self) -> bool:
        return self.passed


@dataclass
class FakeCopies:
    """Records what is asked of it, and copies only in :meth:`run_until`."""

    log: list[tuple[str, int]] = field(default_factory=list)
    pinned: list[bool] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    full: Callable[[int], bool] = lambda number: False
    seconds: Callable[[bool], float] = lambda pin: 0.0
    _pending: deque[tuple[FakeFence, list[Any], list[torch.Tensor]]] = field(
        default_factory=deque
    )
    _copies: int = 0

    def copy(self, data: Any, pin: bool) -> Copy:
        number, self._copies = self._copies, self._copies + 1
        if self.full(number):
            self.log.append(("full", number))
            raise torch.cuda.OutOfMemoryError("no room")
        self.log.append(("copy", number))
        self.pinned.append(pin)
        sources, targets = [], []

        def begin(tensor: torch.Tensor) -> torch.Tensor:
            sources.append(weakref.ref(tensor))
            targets.append(torch.full_like(tensor, -1))
            return targets[-1]

        moved = map_batch(data, begin, lambda item: item)
        fence = FakeFence(number)
        self._pending.append((fence, sources, targets))
        return Copy(moved, data, fence)

    def wait(self, fence: Any) -> None:
        self.log.append(("wait", fence.number))

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor.data_ptr())
        self.log.append(("keep", self.log[-1][1]))

    def run_until(self, number: int) -> None:
        """Lets the device catch up with a copy; what it reads must still be there."""
        while self._pending and self._pending[0][0].number <= number:
            fence, sources, targets = self._pending.popleft()
            for source, target in zip(sources, targets, strict=True):
                alive = source()
                assert alive is not None, f"the source of copy {fence.number} is freed"
                target.copy_(alive)
            fence.passed = True


@dataclass
class FakeProbe:
    """A device with so much memory, of which the training leaves so much."""

    total_bytes: int = 100 * BATCH_BYTES
    free_bytes: int = 90 * BATCH_BYTES
    step_bytes: int = 10 * BATCH_BYTES
    reads: int = 0

    def __call__(self) -> MemoryReading:
        self.reads += 1
        active = self.total_bytes - self.free_bytes
        peak = active + self.step_bytes
        return MemoryReading(self.total_bytes, self.free_bytes, active, peak)


class Source:
    """Loaded batches, some of them not there yet; holds none that it has given."""

    def __init__(self, *script: Any) -> None:
        self.script = deque(script)
        self.given = 0
        self.alive: dict[int, weakref.ref[torch.Tensor]] = {}

    def __call__(self) -> tuple[int, Any] | None:
        if not self.script:
            return None
        number = self.script.popleft()
        if number is None:
            return None
        if isinstance(number, Exception):
            raise number
        batch = batch_of(number)
        self.alive[number] = weakref.ref(batch)
        self.given += 1
        return number, batch


def batch_of(number: int) -> torch.Tensor:
    return torch.full((SAMPLES, WIDTH), float(number))


def prefetcher(
    source: Callable[[], Any],
    copies: FakeCopies | None = None,
    probe: FakeProbe | None = None,
) -> tuple[DevicePrefetcher[Any], FakeCopies]:
    copies = copies or FakeCopies()
    device = torch.device("meta")  # anything but the CPU; nothing is moved there
    made = DevicePrefetcher[Any](source, device, copies, probe or FakeProbe())
    return made, copies


def take_all(ahead: DevicePrefetcher[Any], copies: FakeCopies) -> list[int]:
    """Takes until nothing comes; checks each copied batch once the device is there."""
    tags = []
    while (got := ahead.take()) is not None:
        tag, data = got
        if data.device.type == "cpu":
            copies.run_until(copies.log[-1][1])
            assert torch.equal(data, batch_of(tag))
        tags.append(tag)
    return tags


def test_a_batch_is_copied_waited_for_and_kept_before_it_is_used() -> None:
    source = Source(*range(20))
    ahead, copies = prefetcher(source)
    for number in range(20):
        got = ahead.take()
        assert got is not None
        tag, data = got
        assert tag == number
        if number == 0:
            continue
        copy = number - 1
        story = [what for what, which in copies.log if which == copy]
        assert story == ["copy", "wait", "keep"]
        assert copies.log[-2:] == [("wait", copy), ("keep", copy)]
        assert copies.kept[-1] == data.data_ptr()
        assert (data == -1).all()  # the device is not there yet: nobody has waited
        copies.run_until(copy)
        assert torch.equal(data, batch_of(number))


def test_copies_run_ahead_of_use_by_the_depth() -> None:
    source = Source(*range(40))
    ahead, copies = prefetcher(source)
    for taken in range(1, 30):
        ahead.take()
        copies.run_until(taken)
        assert source.given <= taken + 2
        assert ahead.has_batch == (taken > 1)
    assert ahead.depth == MAX_DEPTH == 2
    assert source.given == 29 + 2
    assert most_ahead(CPU) == 0
    assert take_all(ahead, copies) == list(range(29, 40))


def test_the_first_batch_does_not_wait_for_a_second() -> None:
    source = Source(*range(5), *[None] * 3, *range(5, 15))
    ahead, _ = prefetcher(source)
    ahead.take()
    assert source.given == 1
    ahead.take()
    assert source.given == 3
    while ahead.take() is not None:
        pass
    assert (source.given, ahead.depth) == (5, 2)
    given = []
    for _ in range(4):
        ahead.take()
        given.append(source.given - 5)
    assert given == [1, 3, 5, 6]  # after the pause: at most two at once, then one


def test_a_source_lives_until_its_copy_is_done() -> None:
    source = Source(*range(8))
    ahead, copies = prefetcher(source)
    for _ in range(4):
        ahead.take()
    gc.collect()
    assert [n for n in range(source.given) if source.alive[n]() is not None] == [
        *range(1, source.given)
    ]  # taken or not: the device has read none of the copied ones
    copies.run_until(2)  # batches 1 to 3
    ahead.take()
    gc.collect()
    living = [n for n in range(source.given) if source.alive[n]() is not None]
    assert living == [*range(4, source.given)]


def test_discard_drops_batches_and_not_their_sources() -> None:
    source = Source(0, 1, 2, 3, None, 7, 8)
    ahead, copies = prefetcher(source)
    for _ in range(3):
        ahead.take()
    assert ahead.has_batch
    assert source.given == 4
    ahead.discard()
    assert not ahead.has_batch
    gc.collect()
    assert source.alive[3]() is not None  # the device reads it still
    assert ahead.take() is None
    copies.run_until(2)
    assert take_all(ahead, copies) == [7, 8]
    gc.collect()
    assert source.alive[3]() is None


def test_tight_memory_lowers_the_depth_step_by_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full: list[int] = []
    copies = FakeCopies(full=lambda number: number in full)
    ahead, _ = prefetcher(Source(*range(200)), copies)
    assert [ahead.take()[0] for _ in range(5)] == [0, 1, 2, 3, 4]  # type: ignore[index]
    assert ahead.depth == 2
    with caplog.at_level(logging.WARNING):
        full.append(copies._copies)
        assert ahead.take() is not None
        assert ahead.depth == 1
        full.extend(range(copies._copies, copies._copies + 100))
        tags = take_all(ahead, copies)
    assert tags == list(range(6, 200))
    assert ahead.depth == 0
    assert [what for what, _ in copies.log].count("full") == 2
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "from now on 1 are prefetched",
        "from now on 0 are prefetched",
    ]


def test_the_gauge_sets_the_depth() -> None:
    probe = FakeProbe()
    ahead, copies = prefetcher(Source(*range(500)), probe=probe)
    depths = []

    def go(batches: int) -> None:
        for _ in range(batches):
            ahead.take()
            copies.run_until(copies._copies)
            depths.append(ahead.depth)

    go(1)
    assert probe.reads == 0
    assert depths == [0]
    go(WARM_BATCHES - 1)
    assert set(depths[1:]) == {1}  # careful: no step has shown its peak
    assert probe.reads == 1
    go(1)
    assert (depths[-1], probe.reads) == (2, 2)
    # 10 of reserve and 10 of peak leave one of 21 batches, two of which are held
    probe.free_bytes = 19 * BATCH_BYTES
    go(GAUGE_EVERY_BATCHES - 1)
    assert (depths[-1], probe.reads) == (2, 2)
    go(1)
    assert (depths[-1], probe.reads) == (1, 3)
    probe.free_bytes = 3 * BATCH_BYTES
    go(GAUGE_EVERY_BATCHES)
    assert depths[-1] == 0
    probe.free_bytes = 60 * BATCH_BYTES
    go(GAUGE_EVERY_BATCHES)
    assert depths[-1] == 2
    assert probe.reads == 5


def test_the_times_of_a_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    class Slow(FakeCopies):
        def copy(self, data: Any, pin: bool) -> Copy:
            now_s[0] += 0.125
            return super().copy(data, pin)

    ahead, _ = prefetcher(Source(*range(30)), Slow())
    found = []
    for _ in range(3):
        ahead.take()
        found.append(ahead.transfer_s)
    assert found == [0.0, 0.25, 0.125]


def test_what_only_its_own_to_can_move_is_moved_when_handed_out() -> None:
    class Graph:
        moved_to: torch.device | None = None

        def to(self, device: torch.device) -> Graph:
            self.moved_to = device
            return self

    graphs = iter([(number, Graph()) for number in range(5)])
    ahead, copies = prefetcher(lambda: next(graphs, None))
    for number in range(5):
        got = ahead.take()
        assert got is not None
        assert got[0] == number
        assert got[1].moved_to == torch.device("meta")
        assert not ahead.has_batch
    assert copies.log == []


def test_the_cpu_passes_batches_through() -> None:
    script: list[Any] = [(0, {"x": batch_of(0)}), (1, [batch_of(1)]), None, (2, "a")]
    left = deque(script)
    ahead = DevicePrefetcher[Any].on(left.popleft, CPU)
    for taken, item in enumerate(script, start=1):
        assert ahead.take() is item
        assert len(left) == len(script) - taken
        assert not ahead.has_batch
        ahead.discard()
    assert ahead.depth == 0


def test_other_devices_get_each_batch_when_it_is_handed_out() -> None:
    source = Source(0, 1)
    got = DevicePrefetcher[Any].on(source, torch.device("meta")).take()
    assert got is not None
    assert (got[1].device.type, source.given) == ("meta", 1)


def test_behind_a_real_feed() -> None:
    """Leases come in pieces, the loader has workers' depth, nothing is lost."""
    keys = list(range(24))
    data = TensorDataset(torch.arange(24.0))
    feed: BatchFeed[int]
    leases = deque([(0, 3), (3, 4), (4, 8)])

    def refill() -> None:
        if leases and not ahead.has_batch:
            for batch in range(*leases.popleft()):
                feed.push(batch, IndexBatch(keys[3 * batch : 3 * batch + 3]))
            if not leases:
                feed.end()

    feed = BatchFeed(DataLoader(data, batch_size=3), torch.Generator(), refill)
    ahead, copies = prefetcher(feed.next)
    feed.start()
    seen = []
    for _ in range(40):
        got = ahead.take()
        if got is not None:
            copies.run_until(copies._copies)
            if got[1][0].device.type == "cpu":
                assert got[1][0].tolist() == [3.0 * got[0] + i for i in range(3)]
            seen.append(got[0])
    assert seen == list(range(8))
    assert copies.log


@pytest.mark.parametrize(
    ("backend", "fraction", "reading"),
    [
        ("native", 1.0, (30 + 15, 25, 60)),
        ("native", 0.5, (10 + 15, 25, 60)),  # 50 allowed, 40 of them reserved
        ("native", 0.3, (15, 25, 60)),
        ("cudaMallocAsync", 0.0, (30 + 15, 25, 60)),  # 0 before its first use
    ],
)
def test_the_probes_arithmetic(
    monkeypatch: pytest.MonkeyPatch, backend: str, fraction: float, reading: Any
) -> None:
    """Of 100, 30 are free and 40 the allocator's, 25 of those in use."""
    stats = {
        "active_bytes.all.current": 25,
        "active_bytes.all.peak": 60,
        "reserved_bytes.all.current": 40,
    }
    for name, value in (
        ("mem_get_info", (30, 100)),
        ("memory_stats", stats),
        ("get_per_process_memory_fraction", fraction),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    assert read_memory(torch.device("cuda")) == (100, *reading)
