"""Low-rank adapters on a frozen network; only they and the head are trained."""

import torch
import torch.nn.functional as F
from saved import save
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche

RANK, ALPHA = 4, 8


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(RANK, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x):
        return self.base(x) + ALPHA / RANK * (x @ self.lora_a.T @ self.lora_b.T)


def add_lora(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child))
        else:
            add_lora(child)


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
data = TensorDataset(images[:1500], torch.tensor(digits.target[:1500]))
loader = DataLoader(data, batch_size=32, shuffle=True)

backbone = nn.Sequential(
    *(nn.Linear(64, 96), nn.Tanh()),
    nn.Sequential(nn.Linear(96, 96), nn.Tanh()),
    nn.LayerNorm(96),
)
for parameter in backbone.parameters():
    parameter.requires_grad_(False)
add_lora(backbone)
model = nn.Sequential(backbone, nn.Linear(96, 10))
trainable = [each for each in model.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.01)
# elche: model, optimizer, loader = elche.setup(model, optimizer, loader)

samples = 0
for _epoch in range(3):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        samples += len(x)
save(model, optimizer.param_groups[0]["lr"], samples)
