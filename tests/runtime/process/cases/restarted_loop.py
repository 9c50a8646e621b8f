"""A loop that is killed again and again; see `test_restarts_e2e`.

Arguments: folder for its notes, the policy, and how often a rank is killed. Each rank
counts the samples that it is handed, a count that belongs to the checkpoint, and writes
it to ``seenN.pt`` in the end.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche

SAMPLES, EPOCHS, BATCH = 2000, 16, 8
STEPS_OF_A_LIFE = (20, 250)
SLEEP_S = 0.005
folder, policy, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


class Seen:
    """How often this rank's loop was handed each sample."""

    def __init__(self) -> None:
        self.counts = torch.zeros(SAMPLES, dtype=torch.int64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.counts.copy_(state["counts"])


torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 4))
loader = DataLoader(data, batch_size=BATCH, shuffle=True)
# A rank that a busy machine has left out would not come to its death, and the others
# would outlive it.
model, optimizer, loader = elche.setup(
    model,
    optimizer,
    loader,
    epochs=EPOCHS,
    policy=policy,
    leave_out=False,
    survive=False,
)
seen = Seen()
elche.register_for_checkpointing(seen)

killed = len(list(folder.glob("killed*")))
lottery = random.Random(killed)
is_next = lottery.randrange(elche.world_size()) == elche.rank() and killed < kills
life = lottery.randint(*STEPS_OF_A_LIFE)

for _ in elche.epochs(EPOCHS):
    for keys, x in loader:
        life -= 1
        if is_next and life == 0:
            (folder / f"killed{killed}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        seen.counts[keys] += 1
        time.sleep(SLEEP_S)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

assert elche.progress_samples() == SAMPLES * EPOCHS
torch.save(seen.counts, folder / f"seen{elche.rank()}.pt")
