"""What a reduction takes between these ranks, measured before any is needed."""

from __future__ import annotations

import time

import torch

from elche.comm.exchange import open_exchange
from elche.comm.process_group import Group

PROBED_ELEMENTS = 1 << 20
ROUNDS = 3


def probe_reduction_s(group: Group, numel: int) -> float:
    """Seconds of one float32 reduction of ``numel`` elements, together with all ranks.

    The quickest of a few, of a message of at most a million elements, scaled up: what
    the link allows, not what it does while processes are still starting.
    """
    probed = max(1, min(numel, PROBED_ELEMENTS))
    exchange = open_exchange(group, probed, torch.float32, torch.device("cpu"), sides=2)
    quickest_s = float("inf")
    for number in range(ROUNDS):
        side = number % 2
        group.all_reduce(torch.zeros(1), "beginning a probe together")
        started_s = time.perf_counter()
        exchange.contribution(side).zero_()
        exchange.begin(side)
        exchange.finish("probing the link")
        quickest_s = min(quickest_s, time.perf_counter() - started_s)
    return quickest_s * max(1.0, numel / probed)
