"""A script that may be killed at any moment: says each batch, and what it ends with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import elche
from tests.distributed.cases.resume_cases import Seen
from tests.distributed.cases.tasks import Task, begin, take_step

folder, epochs, samples = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
task = Task(samples=samples, batch_size=8)
model, optimizer, loader = begin(task, deterministic="deterministic" in sys.argv)
seen = Seen()
elche.register_for_checkpointing(seen=seen)
for epoch in elche.epochs(epochs):
    for x, y, index, _ in loader:
        take_step(model, optimizer, x, y)
        seen.pairs += [(epoch, at) for at in index.tolist() if elche.batch_weight()]
        if elche.is_main_process():
            print("batch", epoch, elche.progress_steps(), flush=True)
rank = elche.rank()
elche.shutdown()
(folder / f"seen{rank}.json").write_text(json.dumps(seen.pairs))
if rank == 0:
    torch.save(model.state_dict(), folder / "end.pt")
