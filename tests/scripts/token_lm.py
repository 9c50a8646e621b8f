"""A language model over padded sentences: the loss is a mean over tokens."""

import torch
import torch.nn.functional as F
from saved import save
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

# elche: import elche

WORDS, PADDING, EPOCHS = 32, -100, 3


def make_sentences(count):
    sentences = []
    for _ in range(count):
        length = int(torch.randint(2, 30, ()))
        start, step = torch.randint(WORDS, ()), torch.randint(1, 4, ())
        sentences.append((start + step * torch.arange(length)) % WORDS)
    return sentences


def collate(batch):
    return {
        "input_ids": pad_sequence([words[:-1] for words in batch], batch_first=True),
        "labels": pad_sequence(
            [words[1:] for words in batch], batch_first=True, padding_value=PADDING
        ),
    }


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24)
        self.read = nn.GRU(24, 48, batch_first=True)
        self.head = nn.Linear(48, WORDS)

    def forward(self, input_ids, labels):
        logits = self.head(self.read(self.embed(input_ids))[0])
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING
        )


torch.manual_seed(0)
loader = DataLoader(make_sentences(512), 32, shuffle=True, collate_fn=collate)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
total_steps = EPOCHS * len(loader)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: max(0.0, 1 - step / total_steps)
)
# elche: tokens_of = lambda batch: (batch["labels"] != PADDING).sum()
# elche: model, optimizer, loader = elche.setup(
# elche:     model, optimizer, loader, weight_of=tokens_of, schedulers=[scheduler])

samples = 0
for _epoch in range(EPOCHS):
    for batch in loader:
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        samples += len(batch["labels"])
save(model, scheduler.get_last_lr()[0], samples)
