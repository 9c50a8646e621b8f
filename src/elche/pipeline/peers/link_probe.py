"""Latency and rate of the links that stages use between hosts, measured by echoes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations

import torch

from elche.comm.transport.messages import Message
from elche.pipeline.peers.peers import StagePeers

LARGE_BYTES = 1 << 18
"""Size of the long message, which takes 0.2 s at 10 Mbit/s."""
ROUNDS = 3
_WHAT = "an echo that measures the link"
MOST_S = 0.2
"""Time (s) after which a message is not sent again."""


def measure_links(
    peers: StagePeers | None, members: Sequence[int], timeout_s: float
) -> list[tuple[int, int, float, float]]:
    """Measures this rank's links to higher ranks; call it on all members at once.

    Ranks that share memory have no link; `LayerTimes.message_s` is the time of their
    messages.

    Returns:
        For each link the indices of its two ranks in `members`, the latency (s), and
        the bytes per second.
    """
    found = []
    for (one, low), (other, high) in combinations(enumerate(members), 2):
        if peers is None or peers.rank not in (low, high):
            continue
        partner = high if peers.rank == low else low
        if partner in peers.transport.memory:
            continue
        if peers.rank == high:
            while (message := peers.receive(low, timeout_s, _WHAT)).tensors:
                peers.send(low, message, timeout_s, _WHAT)
            continue
        # The first echo arrives when the partner has reached this link.
        sizes = (1, 1, LARGE_BYTES)
        _, latency_s, large_s = (_echo_s(peers, high, n, timeout_s) for n in sizes)
        peers.send(high, Message(), timeout_s, _WHAT)
        rate = LARGE_BYTES / max(large_s - latency_s, 1e-9)
        found.append((one, other, latency_s, rate))
    return found


def _echo_s(peers: StagePeers, rank: int, nbytes: int, timeout_s: float) -> float:
    """Half of the shortest round-trip time (s) of a message."""
    message = Message((torch.zeros(nbytes, dtype=torch.uint8, device="cpu"),))
    took_s: list[float] = []
    while len(took_s) < ROUNDS and sum(took_s) < MOST_S:
        begin_s = time.perf_counter()
        peers.send(rank, message, timeout_s, _WHAT)
        peers.receive(rank, timeout_s, _WHAT)
        took_s.append(time.perf_counter() - begin_s)
    return min(took_s) / 2
