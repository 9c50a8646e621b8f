"""A `Trainer` whose rank 1 is killed, and which another joins: `FOLDER POLICY`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elche
from elche.runtime.process.launchers import launch_facts
from elche.trainer.trainer_result import EpochRecord

EPOCHS = 20
WITHIN_S = 120.0
own, is_joiner, losses = elche.rank(), launch_facts().joins, 0
word = Path(sys.argv[1], "come")
if is_joiner:
    word.touch()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    global losses
    losses += 1
    time.sleep(0.01)
    if own == 1 and losses == 6 and not is_joiner:
        os.kill(os.getpid(), signal.SIGKILL)
    return (output - target).square().mean()


def wait_for_the_joiner(record: EpochRecord) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not word.exists() and time.monotonic() < until_s:
        time.sleep(0.05)


torch.manual_seed(0)
data = TensorDataset(torch.randn(400, 4), torch.randn(400, 2))
trained = elche.Trainer(
    lambda: nn.Linear(4, 2),
    lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    loss_fn,
    dataset=data,
    eval_dataset=data,
    batch_size=12,
    epochs=EPOCHS,
    on_epoch_end=wait_for_the_joiner,
    policy=sys.argv[2],
).fit()
samples = {record.samples for record in trained.history}
assert (len(trained.history), samples) == (EPOCHS, {400}), trained.history
total = sum(float(value.sum()) for value in trained.model_state.values())
sys.stdout.write(f"done {own}: sum {total!r}\n")
