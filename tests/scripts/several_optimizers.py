"""A recommender: SGD for its embeddings, AdamW for its layers, a schedule for each."""

import torch
import torch.nn.functional as F
from saved import save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche

USERS, ITEMS, EPOCHS = 60, 40, 3


class Recommender(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        return (u * i).sum(1) + self.mlp(torch.cat([u, i], dim=1)).squeeze(1)


torch.manual_seed(0)
user, item = torch.randint(USERS, (1600,)), torch.randint(ITEMS, (1600,))
taste, kind = torch.randn(USERS, 4), torch.randn(ITEMS, 4)
rating = (taste[user] * kind[item]).sum(1).clamp(-3, 3)
loader = DataLoader(TensorDataset(user, item, rating), batch_size=32, shuffle=True)

model = Recommender()
embeddings = [*model.users.parameters(), *model.items.parameters()]
embed_optimizer = torch.optim.SGD(embeddings, lr=0.5, momentum=0.5)
mlp_optimizer = torch.optim.AdamW(model.mlp.parameters(), lr=3e-3)
embed_scheduler = torch.optim.lr_scheduler.ExponentialLR(embed_optimizer, gamma=0.99)
mlp_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(mlp_optimizer, T_max=EPOCHS)
# elche: model, mlp_optimizer, loader = elche.setup(model, mlp_optimizer, loader)
# elche: elche.follow(embed_scheduler)

samples = 0
for _epoch in range(EPOCHS):
    for u, i, r in loader:
        loss = F.mse_loss(model(u, i), r)
        embed_optimizer.zero_grad()
        mlp_optimizer.zero_grad()
        loss.backward()
        embed_optimizer.step()
        mlp_optimizer.step()
        embed_scheduler.step()
        samples += len(r)
    mlp_scheduler.step()
save(model, embed_scheduler.get_last_lr()[0], samples)
