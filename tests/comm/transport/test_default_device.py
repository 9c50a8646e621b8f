"""torch's default device is the script's: nothing of elche depends on it.

"meta" stands for a device that is not the CPU: a tensor made there by mistake has no
values, so whatever needs them fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from tests.distributed.cases.tasks import identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
SAMPLES = 72


def _model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16, device="cpu"), nn.BatchNorm1d(16, device="cpu")]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(16, 3, device="cpu"))


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _data() -> TensorDataset:
    draw = torch.Generator().manual_seed(8)
    x = torch.randn(SAMPLES, 6, generator=draw, device="cpu")
    y = torch.randint(3, (SAMPLES,), generator=draw, device="cpu")
    return TensorDataset(x, y)


def _by_setup(options: dict[str, Any]) -> State:
    model = _model()
    if options["policy"] == "sync":
        model = elche.convert_sync_batchnorm(model)
    model, optimizer, loader = elche.setup(
        model,
        _optimizer(model.parameters()),
        DataLoader(_data(), 6),
        weight_of=lambda batch: batch[1].sum(),
        **nested(options),
    )
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            elche.log_scalar("loss", loss)
    assert "loss" in elche.epoch_metrics().scalars
    state = {name: value.clone() for name, value in model.state_dict().items()}
    elche.shutdown()
    return state


def _by_trainer(options: dict[str, Any]) -> State:
    result = elche.Trainer(
        _model,
        _optimizer,
        F.cross_entropy,
        dataset=_data(),
        eval_dataset=_data(),
        batch_size=6,
        epochs=2,
        shuffle=False,
        **nested(options),
    ).fit()
    return result.model_state


WAYS = {"setup": _by_setup, "trainer": _by_trainer}


def _with_default(way: str, options: dict[str, Any]) -> list[State]:
    """The same training twice: as torch comes, and beside another default device."""
    states = []
    for device in (None, "meta"):
        torch.set_default_device(device)
        try:
            states.append(WAYS[way](options))
        finally:
            torch.set_default_device(None)
    return states


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("setup", {"policy": "sync"}),
        ("setup", {"policy": "sync", "transport": "gloo"}),
        ("setup", {"policy": "cadence", "codec": "int8"}),
        ("setup", {"policy": "cadence", "update": "gradients"}),
        ("setup", {"policy": "async", "codec": "int8"}),
        ("setup", {"policy": "async", "seed": 5}),
        ("trainer", {"policy": "sync", "seed": 5}),
    ],
    ids=str,
)
def test_ranks_train_as_ever_beside_another_default_device(
    ranks2: RankPool, way: str, options: dict[str, Any]
) -> None:
    options = {**options, "deterministic": True}
    found = ranks2.run(_with_default, way, options, case_setup=serve_in_thread)
    assert all(value.device.type == "cpu" for value in found[0][1].values())
    assert identical([each for pair in found for each in pair])


def test_one_device_trains_as_ever() -> None:
    """With a seed elche draws the samples; else the loader does, as in any script."""
    assert identical(_with_default("setup", {"policy": "async", "seed": 5}))
