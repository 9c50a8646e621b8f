"""A script in which a rank ends in some way: `outlived.py RANK HOW POLICY [MORE]`."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

import elche
from tests.harness.small_loop import begin, sum_of, take_step

ENDS_AT = 6
rank, how, policy = int(sys.argv[1]), sys.argv[2], sys.argv[3]
own = elche.rank()


class Evens(Sampler[int]):
    """The even samples, then the odd ones."""

    def __iter__(self) -> Iterator[int]:
        yield from (*range(0, 400, 2), *range(1, 400, 2))

    def __len__(self) -> int:
        return 400


order: dict[str, Any] = {"sampler": Evens()} if "own" in sys.argv else {"shuffle": True}
order["num_workers"] = 2 * ("workers" in sys.argv)
model, optimizer, loader = begin(400, 4, order, policy=policy)
longest_s = 0.0  # between two batches of an epoch
for epoch in range(2):
    last_s = math.inf
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
        longest_s = max(longest_s, time.monotonic() - last_s)
        last_s = time.monotonic()
    elche.barrier()
sys.stdout.write(
    f"done {elche.rank()} of {elche.world_size()}: {elche.progress_samples():g} "
    f"samples, sum {sum_of(model)!r}, "
    f"at most {longest_s:.3f} s between batches\n"
)
