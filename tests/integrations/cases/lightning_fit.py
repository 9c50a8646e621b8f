"""A LightningModule trained in one of several ways; prints what came of it.

Usage: lightning_fit.py STRATEGY [WAY ...], under ``elche run`` or alone.
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


class Estimating(Regression):
    """Asks for the number of its steps before there is an optimizer."""

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


MODULES = {"manual": Manual, "estimated": Estimating}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 3},
    "limited": {"limit_train_batches": 3},
    "steps": {"max_steps": 9, "max_epochs": -1},
    "often": {"val_check_interval": 3},
    "bf16": {"precision": "bf16-mixed"},
    "manual": {},
    "resumed": {"max_epochs": 1},
    "estimated": {},
}


def loaders(is_shuffled: bool) -> tuple[DataLoader[Any], DataLoader[Any]]:
    torch.manual_seed(3)
    x = torch.randn(90, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    shuffle = torch.Generator().manual_seed(4)
    train = DataLoader(data, batch_size=16, shuffle=is_shuffled, generator=shuffle)
    return train, DataLoader(data, batch_size=30)


def trainer(way: str, strategy: str, folder: str, **settings: Any) -> lightning.Trainer:
    return lightning.Trainer(
        **{
            "strategy": strategy,
            "max_epochs": 3,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [ModelCheckpoint(folder, monitor="checked")],
            **WAYS[way],
            **settings,
        }
    )


def fit(way: str, strategy: str) -> list[str]:
    """What came of it, and on this rank alone in the first line."""
    torch.manual_seed(5)
    module = MODULES.get(way, Regression)()
    # A sampler that is left early has drawn less where nobody looks ahead.
    data = loaders(way != "limited")
    # The same folder on all ranks, which Lightning broadcasts from rank 0.
    with tempfile.TemporaryDirectory() as folder:
        fitted = trainer(way, strategy, folder)
        fitted.fit(module, *data)
        saved = Path(fitted.checkpoint_callback.best_model_path)
        assert saved.is_relative_to(folder) == (elche.rank() == 0)
        assert saved.exists()
        if way == "resumed":
            path = folder + "/first.ckpt"
            fitted.save_checkpoint(path)
            path = fitted.strategy.broadcast(path)
            fitted = trainer(way, strategy, folder, max_epochs=3)
            fitted.fit(module, *data, ckpt_path=path)
        fitted.strategy.barrier()
    total = float(sum(p.abs().sum() for p in module.parameters()))
    return [
        f"{way} steps {elche.rank()} {fitted.global_step}",
        *(
            " ".join([way, name, *(f"{value:.6f}" for value in values)])
            for name, values in (("loss", module.seen), ("checked", module.checked))
        ),
        f"{way} parameters {total:.5f}",
    ]


if __name__ == "__main__":
    strategy = sys.argv[1]
    for way in sys.argv[2:] or WAYS:
        lines = fit(way, strategy)
        shown = lines if elche.rank() == 0 else lines[:1]
        sys.stdout.write("\n".join(shown) + "\n")
        sys.stdout.flush()
