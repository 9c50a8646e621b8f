"""Batches on devices that nothing is copied to ahead, and the arithmetic of memory."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from elche.devices.memory import read_memory
from elche.runtime.data.prefetch import DevicePrefetcher, most_ahead
from elche.runtime.data.transfer import tensors_in

CPU = torch.device("cpu")


def test_the_cpu_passes_batches_through() -> None:
    script: list[Any] = [
        (0, {"x": torch.ones(2)}),
        (1, [torch.ones(2)]),
        None,
        (2, "a"),
    ]
    left = deque(script)
    ahead = DevicePrefetcher[Any].on(left.popleft, CPU)
    for taken, item in enumerate(script, start=1):
        assert ahead.take() is item
        assert len(left) == len(script) - taken
        assert not ahead.has_batch
        ahead.discard()
    assert ahead.depth == most_ahead(CPU) == 0


def test_other_devices_get_each_batch_when_it_is_yielded() -> None:
    batches = deque([(0, torch.ones(2)), (1, torch.ones(2))])
    meta = DevicePrefetcher[Any].on(batches.popleft, torch.device("meta"))
    assert meta.take()[1].device.type == "meta"  # type: ignore[index]
    assert len(batches) == 1


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


def test_which_tensors_can_be_seen() -> None:
    a, b = torch.ones(2), torch.zeros(3)

    class Moves:
        def to(self, device: Any) -> Any:
            raise AssertionError("not to be moved here")

    assert tensors_in({"a": a, "b": ["text", (b, 3)], "c": None}) == [a, b]
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    found = tensors_in([packed])
    assert found is not None
    assert found[0] is packed.data
    assert tensors_in([a, Moves()]) is None
    assert tensors_in({"a": torch.eye(2).to_sparse()}) is None
    assert tensors_in("text") == []
