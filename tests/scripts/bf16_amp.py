"""A transformer encoder on digits under bfloat16 autocast."""

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche


class TinyViT(nn.Module):
    """Rows of an image as tokens."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            *(width, 4, 2 * width), dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x) + self.position).mean(1))


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
train_set = TensorDataset(images[:1280], torch.tensor(digits.target[:1280]))
loader = DataLoader(train_set, batch_size=64, shuffle=True)
model = TinyViT()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
# elche: model, optimizer, loader = elche.setup(
# elche:     model, optimizer, loader, schedulers=[scheduler])

samples = 0
for _epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        samples += len(x)
save(model, scheduler.get_last_lr()[0], samples)
