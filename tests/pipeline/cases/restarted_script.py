"""A pipeline's script that waits for a signal at a step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import elche
from elche.pipeline.pipeline import Pipeline
from elche.session.process import process
from tests.pipeline.cases.pipeline_cases import CALM, loss_of
from tests.pipeline.cases.pipeline_state_cases import (
    EPOCHS,
    make_layers,
    make_loader,
    make_optimizer,
)

folder, stopped_at = Path(sys.argv[1]), int(sys.argv[2])
with Pipeline(make_layers(), loss_of, micro_batches=4, seed=11, **CALM) as pipe:
    optimizer = make_optimizer(pipe.parameters())
    pipe.register_optimizer(optimizer)
    torch.manual_seed(3)
    loader = make_loader()
    for _ in elche.epochs(EPOCHS):
        for x, y in pipe.batches(loader):
            pipe.zero_grad()
            loss = pipe.step(x, y).loss
            optimizer.step()
            if pipe.rank == 0:
                with (folder / "losses").open("a") as file:
                    file.write(json.dumps([pipe.steps_done, loss]) + "\n")
                print("step", pipe.steps_done, flush=True)
            if pipe.steps_done == stopped_at:
                until_s = time.monotonic() + 60
                while not process.checkpoints.wants_end():
                    assert time.monotonic() < until_s, "no signal came"
                    time.sleep(0.01)
