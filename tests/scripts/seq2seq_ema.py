"""An encoder and decoder that learn to reverse; label smoothing, and an EMA copy."""

import torch
import torch.nn.functional as F
from saved import save
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

# elche: import elche

SYMBOLS, LENGTH, WIDTH, WARMUP = 20, 8, 32, 40


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(SYMBOLS + 1, WIDTH)
        self.target = nn.Embedding(SYMBOLS + 1, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * WIDTH, WIDTH)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.query, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(3 * WIDTH, 21)

    def forward(self, source, target_in):
        memory, last = self.encoder(self.source(source))
        state = torch.tanh(self.bridge(torch.cat([last[0], last[1]], dim=1)))
        output, _ = self.decoder(self.target(target_in), state.unsqueeze(0))
        weights = (self.query(output) @ memory.transpose(1, 2)).softmax(dim=2)
        return self.head(torch.cat([output, weights @ memory], dim=2))


torch.manual_seed(0)
source = torch.randint(1, SYMBOLS + 1, (1024, LENGTH))
target = source.flip(1)
target_in = F.pad(target[:, :-1], (1, 0))
loader = DataLoader(
    TensorDataset(source, target_in, target), batch_size=32, shuffle=True
)
model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98))
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda step: WIDTH**-0.5 * min((step + 1) ** -0.5, (step + 1) * WARMUP**-1.5) / 4,
)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
# elche: model, optimizer, loader = elche.setup(
# elche:     model, optimizer, loader, schedulers=[scheduler], copies=[ema])

samples = 0
for _epoch in range(3):
    for x, y_in, y in loader:
        logits = model(x, y_in)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)
        samples += len(x)
save(nn.ModuleList([model, ema]), scheduler.get_last_lr()[0], samples)
