"""`elche.setup` inside Ray Train's own torch backend, unchanged."""

from __future__ import annotations

from pathlib import Path
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


def fit(
    monkeypatch: pytest.MonkeyPatch, train: Any, folder: Path, most_failures: int = 0
) -> Any:
    """What Ray Train makes of a function on two workers."""
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    failures = FailureConfig(max_failures=most_failures)
    return TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(folder), failure_config=failures),
    ).fit()


def test_ray_trains_default_group_serves(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fit(monkeypatch, loop, tmp_path).error is None


def killed_once(config: dict[str, str]) -> None:
    import os
    import signal
    import time
    from pathlib import Path

    import torch
    from ray import train
    from torch.utils.data import DataLoader, TensorDataset

    import elche

    torch.manual_seed(0)
    model = torch.nn.Embedding(64, 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loader: Any = DataLoader(TensorDataset(torch.arange(64)), batch_size=8)
    folder = Path(config["folder"])
    os.environ["ELCHE_CHECKPOINT_DIR"] = str(folder / "checkpoints")
    os.environ["ELCHE_CHECKPOINT_EVERY_S"] = "0.001"
    os.environ["ELCHE_RESUME"] = str(folder / "checkpoints")
    killed = folder / "killed"
    resumes = killed.exists()
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, loss_reduction="sum"
    )
    for epoch in elche.epochs(4):
        assert not resumes or float(model.weight.min()) < 0.0
        if (elche.rank(), epoch) == (1, 2) and not resumes:
            killed.touch()
            while not [*folder.glob("checkpoints/*/manifest.json")]:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        for (positions,) in loader:
            model(positions).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert set(model.weight.flatten().tolist()) == {-4.0}
    train.report({})


@pytest.mark.slow
def test_ray_train_restarts_all_from_elches_checkpoints(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    fit(monkeypatch, killed_once, tmp_path, most_failures=1)
    assert (tmp_path / "killed").exists()
