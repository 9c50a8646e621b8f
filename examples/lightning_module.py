"""Handwritten digits with Lightning, on as many devices as there are.

python examples/lightning_module.py                          one device
elche run examples/lightning_module.py                       every GPU of this machine
elche run --speeds 1,0.3 examples/lightning_module.py        two emulated devices

Needs scikit-learn for the data, and `pip install 'elche[lightning]'`.
"""

from __future__ import annotations

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import elche
import elche.integrations.lightning


class Digits(lightning.LightningModule):
    """A small network, trained as on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the ten digits."""
        return self.network(images)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The mean loss of this rank's share of the batch."""
        images, digits = batch
        loss = nn.functional.cross_entropy(self(images), digits)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Right answers, over all held-out digits on every rank."""
        images, digits = batch
        right = (self(images).argmax(1) == digits).float().mean()
        self.log("right", right, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        """Prints on one rank."""
        if elche.is_main_process():
            logged = self.trainer.callback_metrics
            print(
                f"epoch {self.current_epoch}: loss {float(logged['loss']):.4f}, "
                f"{100 * float(logged['right']):.1f}% of held-out digits right",
                flush=True,
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer, as always."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    """Trains five epochs."""
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    )
    train, held_out = random_split(data, [1500, len(data) - 1500])
    trainer = lightning.Trainer(
        strategy="elche",
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        Digits(),
        DataLoader(train, batch_size=50, shuffle=True),
        DataLoader(held_out, batch_size=100),
    )


if __name__ == "__main__":
    main()
