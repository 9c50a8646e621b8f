"""A LightningModule trained in one of several ways; prints what came of it.

Usage: lightning_fit.py WAY, under ``elche run`` or alone.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
import elche.integrations.lightning

warnings.filterwarnings("ignore")


class Regression(lightning.LightningModule):
    """One optimizer, stepped by Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.seen: list[float] = []
        self.checked: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("checked", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.checked.append(float(self.trainer.callback_metrics["checked"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Regression):
    """Two optimizers, stepped by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        first, last = self.layers[0].parameters(), self.layers[2].parameters()
        return torch.optim.SGD(first, lr=0.05), torch.optim.Adam(last, lr=0.01)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 3},
    "limited": {"limit_train_batches": 3},
    "steps": {"max_steps": 9, "max_epochs": -1},
    "often": {"val_check_interval": 3},
    "bf16": {"precision": "bf16-mixed"},
    "manual": {},
}


def loaders(is_shuffled: bool) -> tuple[DataLoader[Any], DataLoader[Any]]:
    torch.manual_seed(3)
    x = torch.randn(90, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    shuffle = torch.Generator().manual_seed(4)
    train = DataLoader(data, batch_size=16, shuffle=is_shuffled, generator=shuffle)
    return train, DataLoader(data, batch_size=30)


def fit(way: str, folder: str) -> Regression:
    torch.manual_seed(5)
    module = Manual() if way == "manual" else Regression()
    trainer = lightning.Trainer(
        **{
            "strategy": "elche",
            "max_epochs": 3,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [ModelCheckpoint(folder, monitor="checked")],
            **WAYS[way],
        }
    )
    # A sampler that is left early has drawn less where nobody looks ahead.
    trainer.fit(module, *loaders(way != "limited"))
    saved = Path(trainer.checkpoint_callback.best_model_path)
    assert saved.exists(), saved
    print(way, "steps", elche.rank(), trainer.global_step, flush=True)
    if elche.rank() == 0:
        total = float(sum(p.abs().sum() for p in module.parameters()))
        for name, values in (("loss", module.seen), ("checked", module.checked)):
            print(way, name, *[f"{value:.6f}" for value in values])
        print(way, "parameters", f"{total:.5f}", flush=True)
    return module


if __name__ == "__main__":
    for way in sys.argv[1:] or WAYS:
        # The same path on all ranks, which Lightning broadcasts from rank 0.
        with tempfile.TemporaryDirectory() as folder:
            fit(way, folder)
            torch.distributed.barrier() if elche.world_size() > 1 else None
