"""Supervised contrastive learning: the loss is over all pairs of a batch."""

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche

TEMPERATURE = 0.2


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return F.normalize(self.body(x.flatten(1)), dim=1)


def contrastive_loss(embeddings, labels):
    """Mean over pairs of one label, against all others of the batch."""
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    similarity = embeddings @ embeddings.T / TEMPERATURE
    log_p = F.log_softmax(similarity.masked_fill(itself, float("-inf")), dim=1)
    is_pair = (labels[:, None] == labels[None, :]) & ~itself
    return -log_p[is_pair].mean() if is_pair.any() else (0 * embeddings).sum()


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
train_set = TensorDataset(images[:1500], torch.tensor(digits.target[:1500]))
loader = DataLoader(train_set, batch_size=60, shuffle=True)
model = Embedder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# elche: model, optimizer, loader = elche.setup(model, optimizer, loader)

samples = 0
for _epoch in range(3):
    for x, y in loader:
        embeddings, labels = model(x), y
        # elche: embeddings, labels = elche.all_gather(embeddings), elche.all_gather(y)
        loss = contrastive_loss(embeddings, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples += len(x)
save(model, optimizer.param_groups[0]["lr"], samples)
