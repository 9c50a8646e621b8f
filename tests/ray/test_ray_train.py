"""`elche.setup` inside Ray Train's own torch backend, unchanged."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.distributed


def loop(config: dict[str, Any]) -> None:
    import torch
    from ray import train
    from torch.utils.data import DataLoader, TensorDataset

    import elche

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.ones(64, 4))
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    seen = 0
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += len(x)
    total = torch.tensor(seen)
    torch.distributed.all_reduce(total)  # Ray's own group stays whole
    assert (int(total), elche.world_size()) == (64, 2)
    train.report({"seen": int(total)})


def test_ray_trains_default_group_serves(
    cluster: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    workers = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
    result = TorchTrainer(
        loop,
        train_loop_config={},
        scaling_config=workers,
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    assert result.error is None
