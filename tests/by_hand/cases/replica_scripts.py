"""A user's script with manual control: `python replica_scripts.py CASE`."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

import tests.harness.uncompiled.sitecustomize  # noqa: F401 - starts faster
from elche.by_hand.replica import Replica, init_group
from elche.session.ranks import rank, world_size


def main(case: str) -> None:
    init_group(timeout_s=60.0)
    model = nn.Linear(2, 1)
    replica = Replica.wrap(model)
    for number in range(4):
        if rank() == world_size() - 1 and number == 2:
            if case == "raise":
                raise ValueError("a fault in user code")
            if case == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "quit":
                return
            if case == "leave":
                break
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        replica.all_reduce_gradients()
    replica.check_equal()
    print(f"done {rank()} of {world_size()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
