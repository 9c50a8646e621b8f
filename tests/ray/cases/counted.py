"""Training that counts: each position's weight tells how often it is in the model."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

SAMPLES, BATCH = 240, 24


def count(folder: str, policy: Any) -> Any:
    """Trains until the folder has a file `stop`, with the least number of epochs.

    Who sees it names the last epoch in another file before the barrier that ends that
    epoch: so all ranks end after the same one. A rank whose file `die-RANK` names a
    phase of a batch and a delay is killed so long after that phase began.

    Args:
        folder: for a line per batch and rank, and what each rank holds in the end.
        policy: of the run.
    """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import elche

    torch.manual_seed(0)
    stop, last = Path(folder) / "stop", Path(folder) / "last"
    own = os.environ.get("RANK", "0")
    model = nn.Embedding(SAMPLES, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def die_in(phase: str) -> None:
        if (wish := Path(folder) / f"die-{own}").exists():
            wanted, delay_s = wish.read_text().split()
            if wanted == phase:
                threading.Timer(float(delay_s), die).start()

    def die() -> None:
        (Path(folder) / f"die-{own}").unlink(missing_ok=True)
        (Path(folder) / f"died-{own}").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(lambda *_: die_in("forward"))
    model.weight.register_hook(lambda _: die_in("backward"))
    model.weight.register_post_accumulate_grad_hook(lambda _: die_in("reduction"))
    data = TensorDataset(torch.arange(SAMPLES))
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, policy=policy, loss_reduction="sum"
    )
    with open(Path(folder) / f"rank-{own}.log", "w", buffering=1) as log:
        for epoch in elche.epochs(100_000):
            for (positions,) in loader:
                model(positions).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                log.write(
                    f"{time.monotonic()} {os.getpid()} {elche.world_size()} {epoch} "
                    f"{json.dumps(positions.tolist())}\n"
                )
            if stop.exists() and epoch + 1 >= int(stop.read_text()):
                last.with_suffix(f".{own}").write_text(str(epoch))
                last.with_suffix(f".{own}").rename(last)
            elche.barrier()
            if last.exists() and epoch >= int(last.read_text()):
                break
    weights = model.weight.detach()
    held = {
        "rank": elche.rank(),
        "world": elche.world_size(),
        "epochs": epoch + 1,
        "samples": elche.progress_samples(),
        "least": -float(weights.max()),
        "most": -float(weights.min()),
        "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }
    (Path(folder) / f"held-{own}.json").write_text(json.dumps(held))
    return held


if __name__ == "__main__":
    count(*sys.argv[1:])
