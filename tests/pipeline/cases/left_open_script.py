"""A pipeline's script that ends without `Pipeline.close`, on a slow disk."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import elche
from elche.checkpoint.writer import CheckpointWriter
from elche.pipeline.pipeline import Pipeline
from tests.pipeline.cases.pipeline_cases import CALM, loss_of
from tests.pipeline.cases.pipeline_state_cases import (
    make_layers,
    make_loader,
    make_optimizer,
)

write = CheckpointWriter._write


def write_slowly(writer: CheckpointWriter, job: Any) -> None:
    time.sleep(1.0)
    write(writer, job)


CheckpointWriter._write = write_slowly  # type: ignore[method-assign]
pipe = Pipeline(make_layers(), loss_of, micro_batches=4, seed=11, **CALM)
pipe.register_optimizer(make_optimizer(pipe.parameters()))
for _ in elche.epochs(1):
    for x, y in pipe.batches(make_loader()):
        pipe.zero_grad()
        pipe.step(x, y)
    elche.save(Path(sys.argv[1]))
