"""Reduction time between these ranks, measured before the first reduction."""

from __future__ import annotations

import time

import torch

from elche.comm.transport.exchange import Exchange
from elche.comm.transport.host_exchange import open_by_hosts
from elche.comm.transport.process_group import Group

FIRST_ELEMENTS = 1 << 12
"""First message: 16 KiB, which takes 1/80 s at 10 Mbit/s."""
PROBED_ELEMENTS = 1 << 20
"""Elements of the longest message that is tried."""
GROWTH = 8
LONG_ENOUGH_S = 0.05
"""Reduction time (s) from which messages are not made longer."""
ROUNDS = 3
MOST_S = 0.1
"""Time (s) after which no further round is started."""


def probe_reduction_s(group: Group, numel: int) -> float:
    """Measures the seconds of a float32 reduction of ``numel`` elements; collective.

    Sums hierarchically over hosts, like gradients.

    Messages grow until one takes ``LONG_ENOUGH_S``, to limit the load on a slow link.
    The quickest of a few rounds counts, since others may be slowed by starting
    processes. For more elements than probed, the time is extrapolated: the latency,
    measured with one element, counts once, and the rest scales with the size.
    """
    if group.world_size == 1:
        return 0.0
    wanted = max(1, numel)
    longest = min(wanted, PROBED_ELEMENTS)
    probed = min(longest, FIRST_ELEMENTS)
    while probed < longest and _probed(group, probed, 1)[1] < LONG_ENOUGH_S:
        probed = min(longest, probed * GROWTH)
    quickest_s, _ = _probed(group, probed, ROUNDS)
    if probed == wanted:
        return quickest_s
    latency_s = min(quickest_s, _probed(group, 1, ROUNDS)[0])
    return latency_s + (quickest_s - latency_s) * wanted / probed


def _probed(group: Group, numel: int, rounds: int) -> tuple[float, float]:
    exchange = open_by_hosts(group, numel, torch.float32, torch.device("cpu"))
    return message_times_s(group, exchange, rounds)


def message_times_s(
    group: Group, exchange: Exchange, rounds: int
) -> tuple[float, float]:
    """Times messages in seconds; a collective call.

    Returns:
        This rank's quickest time, and the minimum over rounds of the slowest rank's,
        which is the same on all ranks; so only the latter decides how to continue.
    """
    own_s = slowest_s = float("inf")
    spent_s = taken_s = 0.0
    for number in range(rounds + 1):
        times = torch.zeros(group.world_size, dtype=torch.float64, device="cpu")
        times[group.rank] = taken_s
        group.all_reduce(times, "beginning a probe together")
        if number:  # times of the previous round
            last_s = float(times.max())
            slowest_s = min(slowest_s, last_s)
            spent_s += last_s
        if number == rounds or (number and spent_s + slowest_s > MOST_S):
            break
        exchange.contribution(0).zero_()
        started_s = time.perf_counter()
        exchange.begin(0)
        exchange.finish("probing the link")
        taken_s = time.perf_counter() - started_s
        own_s = min(own_s, taken_s)
    return own_s, slowest_s
