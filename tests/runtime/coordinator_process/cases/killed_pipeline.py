"""A pipeline's script whose first rank kills the coordinator, now and then."""

from __future__ import annotations

import os
import signal

from benchmarks.chaos_killer import coordinator_pid
from elche.pipeline.pipeline import Pipeline
from tests.pipeline.cases.pipeline_cases import CALM, loss_of
from tests.pipeline.cases.pipeline_state_cases import (
    make_layers,
    make_loader,
    make_optimizer,
)

kills = 0
with Pipeline(make_layers(), loss_of, micro_batches=4, seed=11, **CALM) as pipe:
    optimizer = make_optimizer(pipe.parameters())
    for epoch in range(3):
        for x, y in make_loader():
            pid = coordinator_pid(os.getppid()) if pipe.rank == 0 else None
            if pid is not None and kills == epoch:
                os.kill(pid, signal.SIGKILL)
                kills += 1
            pipe.zero_grad()
            pipe.step(x, y)
            optimizer.step()
    print(f"rank {pipe.rank} took {pipe.steps_done} steps, {kills} kills", flush=True)
