"""Hugging Face's Trainer and Lightning inside ranks on Ray, beside one device alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

import elche.ray

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Weights = list[list[float]]


def weights_of(model: Any) -> Weights:
    return [value.flatten().tolist() for value in model.state_dict().values()]


def with_lightning(folder: str) -> Weights:
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import elche.integrations.lightning  # noqa: F401  registers the strategy

    class Regression(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return torch.nn.functional.mse_loss(self.layer(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    torch.manual_seed(5)
    module, x = Regression(), torch.randn(90, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    settings: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    trainer = lightning.Trainer(max_epochs=2, strategy="elche", **settings)
    trainer.fit(module, DataLoader(data, batch_size=16))
    return weights_of(module)


def with_transformers(folder: str) -> Weights:
    import torch
    from transformers import set_seed

    from elche.integrations.transformers import ElcheTrainer, ElcheTrainingArguments

    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 1)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            error = self.layer(x).squeeze(1) - labels
            return {"loss": error.square().mean()}

    set_seed(5)
    model, x = Regression(), torch.randn(40, 6)
    rows = [{"x": row, "labels": row.sum().sin()} for row in x]
    arguments = ElcheTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        max_steps=8,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    ElcheTrainer(model=model, args=arguments, train_dataset=rows).train()
    return weights_of(model)


@pytest.mark.parametrize(
    ("framework", "train"),
    [("lightning", with_lightning), ("transformers", with_transformers)],
)
def test_a_frameworks_loop_trains_as_on_one_device(
    cluster: Any, tmp_path: Any, framework: str, train: Callable[[str], Weights]
) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"needs {framework}: make test-ray-full installs it")
    cpu = elche.ray.RankSpec(resources={"CPU": 0.5})
    args = (os.fspath(tmp_path),)
    one = elche.ray.run(train, [cpu], args=args)
    two = elche.ray.run(train, [cpu, cpu], args=args, speeds=(1.0, 0.5))
    for mine, alone in zip(two, one, strict=True):
        assert mine == pytest.approx(alone, rel=1e-4, abs=1e-6)
