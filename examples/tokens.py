"""Sentences of different lengths: the loss is a mean over tokens, the gradient too.

elche run --speeds 1,0.4 examples/tokens.py

prints what ``python examples/tokens.py`` prints on one device.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import elche

WORDS, PADDING = 32, -100

torch.manual_seed(0)
sentences = []
for _ in range(512):
    length = int(torch.randint(2, 40, ()))
    start, step = torch.randint(WORDS, ()), torch.randint(1, 4, ())
    sentences.append((start + step * torch.arange(length)) % WORDS)


def collate(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pads to the longest; a model reads all but the last word, and tells the next."""
    return {
        "words": pad_sequence([words[:-1] for words in batch], batch_first=True),
        "labels": pad_sequence(
            [words[1:] for words in batch], batch_first=True, padding_value=PADDING
        ),
    }


class Reader(nn.Module):
    """Tells the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24)
        self.read = nn.GRU(24, 48, batch_first=True)
        self.tell = nn.Linear(48, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits of the next word at each place."""
        logits: torch.Tensor = self.tell(self.read(self.embed(words))[0])
        return logits


model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(sentences, 32, shuffle=True, collate_fn=collate)
model, optimizer, loader = elche.setup(
    model,
    optimizer,
    loader,
    policy="sync",
    weight_of=lambda batch: (batch["labels"] != PADDING).sum(),
)

for epoch in range(3):
    for batch in loader:
        logits, labels = model(batch["words"]), batch["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # over tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        elche.log_scalar("loss", loss)
    if elche.is_main_process():
        mean = elche.epoch_metrics().scalars["loss"]
        print(f"epoch {epoch}: loss {mean:.4f} per token")
