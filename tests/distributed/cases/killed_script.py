"""A script that may be killed at any moment: says each batch, and what it has seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import elche
from tests.distributed.cases.resume_cases import Seen
from tests.distributed.cases.tasks import Task, begin, take_step

model, optimizer, loader = begin(Task(samples=400, batch_size=8))
seen = Seen()
elche.register_for_checkpointing(seen=seen)
for epoch in elche.epochs(2):
    for x, y, index, _ in loader:
        take_step(model, optimizer, x, y)
        seen.pairs += [(epoch, at) for at in index.tolist() if elche.batch_weight()]
        if elche.is_main_process():
            print("batch", epoch, elche.progress_steps(), flush=True)
rank = elche.rank()
elche.shutdown()
Path(sys.argv[1], f"seen{rank}.json").write_text(json.dumps(seen.pairs))
