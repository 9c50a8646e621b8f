"""A pipeline that saves by hand, killed once and restarted; see `test_restarts_e2e`.

Arguments: folder for its states, and the step at which rank 1 is killed in the first
start (-1: never). Writes the final parameters to ``end.pt``.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from elche.pipeline import Pipeline

STEPS, SAVE_EVERY = 12, 3
folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
saved, killed = folder / "state.pt", folder / "killed"
layers = [lambda: nn.Linear(4, 4) for _ in range(4)]

with Pipeline(layers, nn.functional.mse_loss, micro_batches=4, seed=0) as pipe:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    first = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        pipe.load_state_dict(state["model"])
        first = state["step"] + 1
        if pipe.rank == 0:
            print(f"goes on with step {first}", flush=True)
    for step in range(first, STEPS):
        if step == kill_at and pipe.rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        pipe.step(batch, batch.flip(1))
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            model = pipe.state_dict(rank=0)
            if pipe.rank == 0:
                torch.save({"model": model, "step": step}, folder / "new.pt")
                os.replace(folder / "new.pt", saved)
    model = pipe.state_dict(rank=0)
    if pipe.rank == 0:
        torch.save(model, folder / "end.pt")
