"""A script in which rank 1 is killed once, and ends an epoch after another has come."""

from __future__ import annotations

import os
import signal
import sys
import time

import elche
from elche.runtime.process.launchers import launch_facts
from tests.harness.small_loop import begin, sum_of, take_step

own = elche.rank()
is_joiner = launch_facts().joins
order = {"shuffle": True}
model, optimizer, loader = begin(400, 8, order, lr=0.01, policy=sys.argv[1])
has_shrunk, epochs = is_joiner, 0
for epoch in elche.epochs(1000):
    for number, (x,) in enumerate(loader):
        if (own, epoch, number) == (1, 0, 4) and not is_joiner:
            os.kill(os.getpid(), signal.SIGKILL)
        take_step(model, optimizer, x)
        time.sleep(0.004)
        has_shrunk |= elche.world_size() == 2
    elche.barrier()
    epochs = epoch + 1
    if has_shrunk and elche.world_size() == 3:
        break
assert elche.progress_samples() == 400 * epochs, (elche.progress_samples(), epochs)
sys.stdout.write(
    f"done {elche.rank()} of {elche.world_size()}: sum {sum_of(model)!r}\n"
)
