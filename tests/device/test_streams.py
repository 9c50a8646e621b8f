"""Streams, events and time: what is asynchronous, and that each class of race shows."""

from __future__ import annotations

import pytest
import torch

from tests.device import (
    delays,
    device_name,
    has_streams,
    held,
    host_operator_counts,
    kernel_count,
    set_speed,
)


@pytest.fixture(autouse=True)
def streams(device: torch.device) -> None:
    has_streams()


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


@pytest.mark.parametrize("operator", ["copy", "multiply"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_nan_without_record_stream(
    device: torch.device, is_recorded: bool, operator: str
) -> None:
    side = torch.Stream(device)
    source = torch.ones(100, device=device)
    result = torch.zeros(100, device=device)
    torch.accelerator.synchronize()
    with held(side):
        with side:
            if operator == "copy":
                result.copy_(source, non_blocking=True)
            else:
                result = source * 2
        if is_recorded:
            source.record_stream(side)
        del source
        torch.accelerator.current_stream().synchronize()
    side.synchronize()
    expected = {"copy": 100.0, "multiply": 200.0}[operator]
    total = float(result.sum())
    assert total == expected if is_recorded else total != total


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


def test_pinned_source_freed_early(device: torch.device) -> None:
    target = torch.zeros(1 << 16, device=device)
    with held():
        source = torch.ones(1 << 16).pin_memory()
        address = source.data_ptr()
        target.copy_(source, non_blocking=True)
        del source
        others = [torch.zeros(1 << 16).pin_memory() for _ in range(8)]
        assert address not in [each.data_ptr() for each in others]
    assert float(target.sum()) == 1 << 16


def test_pageable_source_is_read_at_once(device: torch.device) -> None:
    target = torch.zeros(100, device=device)
    with held():
        source = torch.ones(100)
        target.copy_(source, non_blocking=True)
        source.zero_()
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


def test_host_operators_are_counted(device: torch.device) -> None:
    mask = torch.ones(3, device=device)
    before = host_operator_counts().get("aten::nonzero", 0)
    mask.nonzero()
    assert host_operator_counts()["aten::nonzero"] == before + 1


def test_copy_between_devices_waits_for_its_source(device: torch.device) -> None:
    source = torch.zeros(100, device=device)
    with held():
        source.add_(1)
        target = source.to(device_name(1), non_blocking=True)
        doubled = target * 2
        source.zero_()
    assert float(doubled.sum()) == 200.0


def test_copy_between_devices_waits_for_its_target(device: torch.device) -> None:
    source = torch.ones(100, device=device)
    target = torch.zeros(100, device=device_name(1))
    torch.accelerator.synchronize()
    with held(torch.accelerator.current_stream(1)):
        target.fill_(7)
        target.copy_(source, non_blocking=True)
        assert not torch.accelerator.current_stream().query()
    assert float(target.sum()) == 100.0


def test_error_of_a_kernel_is_raised_later(device: torch.device) -> None:
    values = torch.ones(3, device=device)
    values[torch.tensor([7], device=device)]
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_wrong_shapes_are_refused_at_once(device: torch.device) -> None:
    one, other = torch.ones(3, device=device), torch.ones(4, device=device)
    with held(), pytest.raises(RuntimeError, match="must match the size"):
        one + other


@pytest.mark.parametrize("index", [None, 1])
def test_two_devices_are_refused(device: torch.device, index: int | None) -> None:
    other = "cpu" if index is None else device_name(index)
    weight = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.nn.functional.layer_norm(weight, (3,), torch.ones(3, device=other))
    with pytest.raises(RuntimeError, match="on the same device"):
        weight.masked_fill_(torch.ones(3, device=other, dtype=torch.bool), 0.0)
    assert (weight + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]


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


def test_devices_have_speeds_of_their_own(device: torch.device) -> None:
    set_speed(0, kernel_us=500)
    set_speed(1, kernel_us=1000, element_ns=1000)
    streams = [torch.accelerator.current_stream(each) for each in range(2)]
    assert kernels_ms(streams[0], 4) >= 4 * 0.5
    assert kernels_ms(streams[1], 4) >= 4 * (1.0 + 1.0)


@pytest.mark.parametrize("pattern", ["copies late", "compute late", "random"])
def test_delays(device: torch.device, pattern: str) -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream(device)
    is_random = pattern == "random"
    with delays(pattern, 1000, seed=7 if is_random else 0):
        if pattern != "copies late":
            assert kernels_ms(main, 20) >= (4.0 if is_random else 20.0)
        if pattern != "compute late":
            assert kernels_ms(side, 20) >= (4.0 if is_random else 20.0)


def test_elapsed_time_needs_complete_events(device: torch.device) -> None:
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    with held():
        end.record()
        with pytest.raises(RuntimeError, match="must be completed before"):
            start.elapsed_time(end)
