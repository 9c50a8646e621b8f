"""The same training where the library owns the loop.

elche run --speeds 1,0.4 examples/trainer.py

The digits come with scikit-learn.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elche

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)

trainer = elche.Trainer(
    lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    nn.CrossEntropyLoss(),
    dataset=TensorDataset(images[:1500], labels[:1500]),
    eval_dataset=TensorDataset(images[1500:], labels[1500:]),
    batch_size=32,
    epochs=5,
    policy="cadence",
    seed=0,
)
result = trainer.fit()
if elche.is_main_process():
    for record in result.history:
        shares = ", ".join(f"{share:.0%}" for share in record.shares)
        print(
            f"epoch {record.epoch}: loss {record.eval_loss:.3f}, "
            f"{record.samples_per_s:.0f} samples/s, shares {shares}"
        )
