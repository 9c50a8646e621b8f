"""Devices by name and type, where torch has no accelerator: others stand in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elche.devices import backends, choice, memory, random_state, streams
from elche.errors import ConfigError
from elche.runtime.process.launch_config import LaunchConfig

CPU = torch.device("cpu")
XPU = torch.device("xpu", 1)


@pytest.fixture
def two_xpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two accelerators that nobody has tried, as far as torch would say."""
    module = SimpleNamespace(
        device_count=lambda: 2,
        is_available=lambda: True,
        get_device_name=lambda device: f"Model {device.index}",
        get_device_properties=lambda device: SimpleNamespace(uuid="f00"),
        mem_get_info=lambda device: (30, 100),
        memory_stats=lambda device: {"reserved_bytes.all.current": 20},
    )
    here = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: here)
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)  # no cache
    return module


def test_every_accelerator_that_torch_knows_can_be_named(two_xpus: Any) -> None:
    assert choice.device_names() == ["xpu:0", "xpu:1"]
    assert [str(choice.default_device(rank)) for rank in (0, 1, 2)] == [
        *("xpu:0", "xpu:1", "xpu:0"),
    ]
    assert choice.check_device("xpu") == torch.device("xpu", 0)
    assert choice.check_device("xpu:1") == XPU
    assert choice.check_device("cpu:0") == CPU
    assert choice.vendor_kind() == "xpu"
    assert choice.product_name(XPU) == "XPU Model 1 (untested)"
    assert choice.product_name(CPU) == "CPU"
    assert memory.read_memory(XPU) == (100, 50, 0, 0)
    for name in ("xpu:2", "cuda", "mps:0"):
        told = rf"'{name}' does not exist: torch can use xpu:0, xpu:1 here"
        with pytest.raises(ConfigError, match=told):
            choice.check_device(name)


def test_accelerators_that_torch_cannot_use_are_not_chosen(two_xpus: Any) -> None:
    two_xpus.is_available = lambda: False  # as with a driver that is too old for torch
    assert choice.count() == 2
    assert choice.default_device(0) == CPU
    assert choice.device_names() == []
    assert choice.vendor_kind() == ""
    assert LaunchConfig(command=("true",)).world_size == 1
    assert choice.check_device("xpu:1") == XPU  # asked for: torch says what is wrong


def test_an_allocator_that_counts_nothing_gives_the_drivers_figures(
    two_xpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(device: torch.device) -> None:
        raise RuntimeError(f"Allocator for {device} is not a DeviceAllocator.")

    del two_xpus.memory_stats
    monkeypatch.setattr(torch.accelerator, "memory_stats", refused)
    assert memory.read_memory(XPU) == (100, 30, 0, 0)


@pytest.mark.parametrize("name", ["tpu9:0", "hpu:0"])  # torch reserves hpu's name
def test_a_type_that_only_an_extension_adds_is_left_to_the_ranks(name: str) -> None:
    assert not choice.is_known(name)
    assert choice.is_known("xpu:7")
    with pytest.raises(ConfigError, match=f"'{name}'; expected .* import the extens"):
        choice.check_device(name)


def test_a_device_without_a_backend_is_summed_through_the_host(
    two_xpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends.dist, "is_xccl_available", lambda: True)
    assert backends.place_of(XPU) == "xccl f00"
    monkeypatch.setattr(backends.dist, "is_xccl_available", lambda: False)
    assert backends.place_of(XPU) == ""
    assert backends.place_of(torch.device("mps", 0)) == ""  # gloo is none of its own
    assert backends.place_of(torch.device("hpu", 0)) == ""
    of_kind = [SimpleNamespace(device=torch.device(kind)) for kind in ("cpu", "xpu")]
    assert [backends.gloo_takes(each) for each in of_kind] == [True, False]


def test_what_a_device_lacks_is_found_by_trial() -> None:
    assert not streams.has_streams(CPU)
    absent = torch.device("mps", 0)
    assert not streams.has_streams(absent)
    assert memory.widest_float(CPU) is torch.float64
    assert memory.widest_float(absent) is torch.float32
    assert memory.is_out_of_memory(torch.OutOfMemoryError("full"))
    assert memory.is_out_of_memory(RuntimeError("MPS backend out of memory (MPS ..."))
    assert not memory.is_out_of_memory(RuntimeError("another"))


def test_streams_are_tried_again_after_a_lack_of_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pinned(*size: int, **options: Any) -> None:
        if is_full:
            raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch, "Stream", lambda device: object())
    device, is_full = torch.device("xpu", 5), True
    assert not streams.has_streams(device)
    is_full = False
    assert streams.has_streams(device)


def test_devices_are_seeded_by_their_generators_or_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeded: list[Any] = []

    def generator(name: str) -> SimpleNamespace:
        return SimpleNamespace(manual_seed=lambda number: seeded.append((name, number)))

    many = [generator("first"), generator("second")]
    monkeypatch.setattr(torch, "mps", generator("current"))
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(default_generators=many))
    before = torch.initial_seed()
    with random_state.forked([CPU]):
        random_state.seed([CPU, torch.device("mps", 0), XPU], before + 1)
        assert torch.initial_seed() == before + 1
    assert seeded == [("current", before + 1), ("second", before + 1)]
    assert torch.initial_seed() == before
