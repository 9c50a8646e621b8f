"""Trains on and prints each tenth step: `endless.py POLICY`."""

from __future__ import annotations

import sys
import time

import elche
from tests.harness.small_loop import begin, take_step

model, optimizer, loader = begin(100_000, 6, policy=sys.argv[1], timeout_s=60.0)
for _ in elche.epochs(1):
    for number, (x,) in enumerate(loader):
        if number % 10 == 0:
            print(f"step {number} at {time.monotonic():.3f}", flush=True)
        take_step(model, optimizer, x)
        time.sleep(0.01)  # a step as long as one that computes
