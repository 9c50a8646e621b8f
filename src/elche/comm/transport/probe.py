"""Reduction time between these ranks, measured before the first reduction."""

from __future__ import annotations

import time

import torch

from elche.comm.transport.host_exchange import open_by_hosts
from elche.comm.transport.process_group import Group

FIRST_ELEMENTS = 1 << 12
"""16 KiB: what a link of 10 Mbit/s carries in an eightieth of a second."""
PROBED_ELEMENTS = 1 << 20
"""The longest message that is tried."""
GROWTH = 8
LONG_ENOUGH_S = 0.05
"""A message that takes so long is not made longer."""
ROUNDS = 3
MOST_S = 0.1
"""Time (s) after which no further round is started."""


def probe_reduction_s(group: Group, numel: int) -> float:
    """Seconds of one float32 reduction of ``numel`` elements, together with all ranks.

    As gradients are summed: over hosts, inside them first.

    Messages grow until one takes a while, so that a slow link is not kept busy for
    longer than it must. The quickest of a few of the longest counts: what the link
    allows, not what it does while processes are still starting. What is left to
    ``numel`` elements is scaled up, after the time of a message of one element has been
    taken off: that is the link's latency, which a longer message has once as well.
    """
    if group.world_size == 1:
        return 0.0
    wanted = max(1, numel)
    longest = min(wanted, PROBED_ELEMENTS)
    probed = min(longest, FIRST_ELEMENTS)
    while probed < longest and _quickest(group, probed, 1)[1] < LONG_ENOUGH_S:
        probed = min(longest, probed * GROWTH)
    quickest_s, _ = _quickest(group, probed)
    if probed == wanted:
        return quickest_s
    latency_s = min(quickest_s, _quickest(group, 1)[0])
    return latency_s + (quickest_s - latency_s) * wanted / probed


def _quickest(group: Group, numel: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """This rank's quickest reduction, and the least that all ranks' slowest took.

    All ranks know the second one, and decide by it alone.
    """
    exchange = open_by_hosts(group, numel, torch.float32, torch.device("cpu"))
    quickest_s = slowest_s = float("inf")
    spent_s = taken_s = 0.0
    for number in range(rounds + 1):
        times = torch.zeros(group.world_size, dtype=torch.float64, device="cpu")
        times[group.rank] = taken_s
        group.all_reduce(times, "beginning a probe together")
        if number:  # what they said of the round before
            last_s = float(times.max())
            slowest_s = min(slowest_s, last_s)
            spent_s += last_s
        if number == rounds or (number and spent_s + slowest_s > MOST_S):
            break
        started_s = time.perf_counter()
        exchange.contribution(0).zero_()
        exchange.begin(0)
        exchange.finish("probing the link")
        taken_s = time.perf_counter() - started_s
        quickest_s = min(quickest_s, taken_s)
    return quickest_s, slowest_s
