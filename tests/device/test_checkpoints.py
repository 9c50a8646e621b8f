"""Checkpoints of the device are resumed on it, and between it and the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from tests.device import KIND, NAME, device_name

SAMPLES, BATCH, EPOCHS, SAVED_AFTER = 96, 16, 4, 2
ROUNDING = 2e-6 if KIND == NAME else 2e-4  # other devices round in their own way


@pytest.fixture
def near() -> str:
    """Name of the second device, or of the only one."""
    if KIND == "cpu":
        pytest.skip("runs go over from a device to the CPU")
    return device_name(min(1, torch.accelerator.device_count() - 1))


def trained(
    device: str, folder: Path, *, saves: bool = False, dropout: float = 0.0
) -> tuple[list[torch.Tensor], list[float]]:
    """The model's state and the loop's draws; of the rest where there is a checkpoint.

    A resumed run is seeded otherwise, so that it must restore the random states.
    """
    data = TensorDataset(torch.arange(SAMPLES * 8.0).view(-1, 8).cos())
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(dropout), nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, BATCH, shuffle=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELCHE_DEVICE", device)
        model, optimizer, batches = elche.setup(model, optimizer, loader, epochs=EPOCHS)
    torch.manual_seed(7 if folder.exists() else 3)
    is_resumed = elche.resume(folder)
    draws = []
    for epoch in elche.epochs(EPOCHS):
        for (x,) in batches:
            draws.append(float(torch.rand(())))
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if saves and epoch + 1 == SAVED_AFTER:
            elche.save(folder)
            break
    elche.shutdown()
    assert next(model.parameters()).device == torch.device(device)
    assert len(draws) == SAMPLES // BATCH * (
        SAVED_AFTER if saves or is_resumed else EPOCHS
    )
    return [each.detach().cpu() for each in model.state_dict().values()], draws


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, near: str) -> None:
    expected, draws = trained(near, tmp_path / "whole", dropout=0.5)
    _, first = trained(near, tmp_path / "cut", saves=True, dropout=0.5)
    torch.rand(3, device=near)
    found, rest = trained(near, tmp_path / "cut", dropout=0.5)
    assert first + rest == draws
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_first", [True, False])
def test_runs_go_over_to_another_kind_of_device(
    tmp_path: Path, near: str, is_first: bool
) -> None:
    devices = (near, "cpu") if is_first else ("cpu", near)
    expected, draws = trained("cpu", tmp_path / "whole")
    _, first = trained(devices[0], tmp_path / "cut", saves=True)
    found, rest = trained(devices[1], tmp_path / "cut")
    assert first + rest == draws
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_state_that_an_optimizer_has_before_setup_follows_its_parameters(
    optimizer: type[torch.optim.Optimizer], near: str
) -> None:
    model, other = nn.Linear(4, 1), nn.Parameter(torch.ones(3))  # which is not moved
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    made = optimizer([*model.parameters(), other], lr=0.1, **options)
    data = TensorDataset(torch.ones(2, 4))
    for device in ("cpu", near):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ELCHE_DEVICE", device)
            _, _, batches = elche.setup(model, made, DataLoader(data, 2))
        for (x,) in batches:
            (model(x).sum() + other.sum().to(device)).backward()
            made.step()
        elche.shutdown()
    assert model.weight.device == torch.device(near)
