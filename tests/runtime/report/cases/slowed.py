"""Trains until it is ended; rank 1 is four times slower while a file is there."""

import sys
import time
from pathlib import Path

import elche
from tests.harness.small_loop import begin, take_step

model, optimizer, loader = begin(640, 16, leave_out=False)
for _ in elche.epochs(1000):
    for (x,) in loader:
        is_slow = elche.rank() == 1 and Path(sys.argv[1]).exists()
        time.sleep(0.004 * len(x) * (4 if is_slow else 1))  # the device's work
        take_step(model, optimizer, x)
