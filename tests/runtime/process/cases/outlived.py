"""A script in which a rank ends in some way: `outlived.py RANK HOW POLICY [own]`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from torch.utils.data import SequentialSampler

import elche
from tests.harness.small_loop import begin, sum_of, take_step

ENDS_AT = 6
rank, how, policy = int(sys.argv[1]), sys.argv[2], sys.argv[3]
own = elche.rank()


class InOrder(SequentialSampler):
    """A sampler of the script's own, whose state elche cannot know."""


order: dict[str, Any] = {"sampler": InOrder(range(400))} if "own" in sys.argv else {}
order = order or {"shuffle": True}
model, optimizer, loader = begin(400, 4, order, policy=policy)
for epoch in range(2):
    for number, (x,) in enumerate(loader):
        if (own, epoch, number) == (rank, 0, ENDS_AT):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "quit":
                os._exit(7)
            elif how == "sleep":
                time.sleep(float(sys.argv[4]))
        take_step(model, optimizer, x)
        time.sleep(0.002)
    elche.barrier()
sys.stdout.write(
    f"done {elche.rank()} of {elche.world_size()}: {elche.progress_samples():g} "
    f"samples, sum {sum_of(model)!r}\n"
)
