"""Rooms of elche that compute on a device: equal to the CPU, and nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.codec.codec import CODECS
from elche.devices import choice, memory, random_state, streams
from elche.errors import ConfigError
from elche.runtime.report.scalars import ScalarLog
from elche.runtime.watch.model_sums import ModelSums
from elche.trainer.micro_batches import MicroBatches
from tests.device import KIND, NAME, extension, held, set_memory_bytes

CPU = torch.device("cpu")
MB = 2**20


def test_devices_are_found_by_name(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU is not chosen by name")
    assert choice.kind() == device.type
    assert choice.device_names()[0] == str(choice.default_device(0)) == str(device)
    assert choice.check_device(device.type) == choice.current_device() == device
    if KIND == NAME:
        assert choice.vendor_kind() == NAME
        assert streams.has_streams(device)
        assert memory.widest_float(device) is torch.float64
    with pytest.raises(ConfigError, match=f"does not exist: torch can use {device}"):
        choice.check_device(f"{device.type}:99")


def test_random_numbers_are_saved_and_forked(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("only accelerators' states are saved by their type")
    saved = random_state.saved_state()
    drawn = torch.rand(4, device=device)
    random_state.restore_saved({**saved, "type": "another"})
    assert not torch.equal(torch.rand(4, device=device), drawn)
    random_state.restore_saved(saved)
    with random_state.forked([device]):
        random_state.seed([device], 5)
        torch.rand(4, device=device)
    assert torch.equal(torch.rand(4, device=device), drawn)


def test_a_scalar_counts_when_the_device_has_computed_it(device: torch.device) -> None:
    log, side = ScalarLog(), torch.Stream(device)
    loss = torch.full((), 2.0, device=device, requires_grad=True)
    log.log("loss", loss, 1.0)
    assert log.drain(final=True) == (("loss", 2.0, 1.0),)
    with held():  # where the host waited, nothing would end this
        log.log("loss", loss * 1.0, 3.0)
        log.log("plain", 5.0, 1.0)
        assert log.drain() == (("plain", 5.0, 1.0),)
        with side:
            log.log("side", torch.full((), 4.0, device=device), 1.0)
        early = log.drain()
        side.synchronize()
        assert early + log.drain() == (("side", 4.0, 1.0),)
        log.log("forgotten", loss, 1.0)
        log.drain()
    assert log.drain(final=True) == (("forgotten", 2.0, 1.0), ("loss", 6.0, 3.0))
    with held():
        log.log("loss", loss, 1.0)
        log.drain()
        log.clear()
        assert log.drain(final=True) == ()


def test_frozen_parameters_are_summed_beside_common_values(
    device: torch.device,
) -> None:
    frozen, trained = (
        nn.Parameter(torch.full((3,), n, device=device)) for n in (1.0, 2.0)
    )
    sums = ModelSums({"frozen": frozen, "trained": trained}.items())
    sums.begin(0, 0, {id(trained): torch.full((3,), 4.0)})
    (check,) = sums.take(0)
    assert check.total == 3 * 1.0 + 3 * 4.0


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_encodes_to_the_same_bytes(device: torch.device, name: str) -> None:
    codec, blocks, found = CODECS[name], 1000, []
    draw = torch.Generator().manual_seed(5)
    values = torch.randn(blocks, codec.block, generator=draw)
    for place in (CPU, device):
        codes = torch.zeros(blocks, codec.code_bytes, dtype=torch.uint8, device=place)
        scales = torch.zeros(
            blocks * codec.scale_bytes // 2, dtype=torch.bfloat16, device=place
        )
        out = torch.zeros_like(values, device=place)
        assert codec.encode(values.to(place), codes, scales)
        codec.decode(codes, scales, out)
        found.append([codes.cpu(), scales.cpu(), out.cpu()])
    assert all(map(torch.equal, *found))


def test_a_full_device_trains_in_micro_batches(device: torch.device) -> None:
    """With the CPU's gradient; a log record that is kept keeps no failed attempt."""
    extension()  # on another device memory has no limit
    x, found, sizes = torch.linspace(-1, 1, 64 * 16).view(64, 16), [], []
    for place in (CPU, device):
        torch.manual_seed(2)
        layers = nn.Linear(16, 1 << 14), nn.Tanh(), nn.Linear(1 << 14, 1)
        model = nn.Sequential(*layers).to(place)
        torch.accelerator.empty_cache()
        set_memory_bytes(0, torch.accelerator.memory_reserved() + 10 * MB)

        def loss_of(part: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            sizes.append(len(part))
            loss: torch.Tensor = model(part).square().mean()
            return loss

        given: dict[str, Any] = {"max_samples": None, "least_samples": 1}
        given |= {"is_sum": False, "weights": None, "host": None}
        parts = MicroBatches(model, place, **given, on_part=lambda part: None)
        parts.backward(x.to(place), 64, loss_of)
        found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    assert sizes[:2] == [64, 64]
    assert 2 <= len(sizes[2:]) <= 8
    torch.testing.assert_close(*found)
