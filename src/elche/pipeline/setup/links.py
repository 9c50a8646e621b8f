"""Measured messages between ranks: the links of the first plan.

Each two ranks send a small and a large message to and fro, one pair after the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

import torch

from elche.comm.transport.message_memory import SLOTS
from elche.comm.transport.messages import Address, Message
from elche.comm.transport.point_to_point import PointToPoint
from elche.schedule.planning.profile import LinkProfile

ROUNDS = 5
SMALL_BYTES, MOST_BYTES = 1 << 10, 1 << 20
_TAG = 0  # no step has begun


def measure_links(
    transport: PointToPoint, members: Sequence[int], size_bytes: int, timeout_s: float
) -> list[list[float]]:
    """Times the messages of this rank's pairs; all members call it together.

    Args:
        transport: this rank's end of messages.
        members: ranks of the pipeline, in order.
        size_bytes: of the largest message between layers; at most 1 MiB is sent.
        timeout_s: deadline of each wait.

    Returns:
        Of each pair that this rank leads: both places in `members`, and latency_s and
        bytes_per_s of `LinkProfile`.

    Raises:
        DeadlineError: another rank did not come in time.
        CommunicationError: a connection broke.
    """
    large = max(2 * SMALL_BYTES, min(size_bytes, MOST_BYTES))
    found: list[list[float]] = []
    for low, high in combinations(range(len(members)), 2):
        if transport.rank not in (members[low], members[high]):
            continue
        leads = transport.rank == members[low]
        pair = _Pair(transport, members[high if leads else low], leads, timeout_s)
        pair.warm(large)
        rounds = [pair.round(large) for _ in range(ROUNDS)]
        if leads:
            small_s, large_s = map(median, zip(*rounds, strict=True))
            per_byte_s = max(1e-15, (large_s - small_s) / (large - SMALL_BYTES))
            latency_s = max(0.0, small_s - SMALL_BYTES * per_byte_s)
            found.append([low, high, latency_s, 1 / per_byte_s])
    transport.flush(timeout_s)
    for outgoing, _ in transport.memory.values():
        outgoing.empty()  # most pairs are no neighbours in the pipeline
    return found


def links_of(
    told: Sequence[Sequence[Sequence[float]]],
) -> Mapping[tuple[int, int], LinkProfile]:
    """The links of all pairs, by the lower place first.

    Args:
        told: of each member, what `measure_links` returned there.
    """
    return {
        (int(low), int(high)): LinkProfile(
            latency_s=latency_s, bytes_per_s=bytes_per_s, efficiency=1.0
        )
        for rows in told
        for low, high, latency_s, bytes_per_s in rows
    }


class _Pair:
    """This rank and another one, which does the same the other way round."""

    def __init__(
        self, transport: PointToPoint, other: int, leads: bool, timeout_s: float
    ) -> None:
        self._transport, self._leads, self._timeout_s = transport, leads, timeout_s
        self._address = Address(other, _TAG, "a message to measure the link")
        self._sent = torch.zeros(MOST_BYTES, dtype=torch.uint8, device="cpu")

    def warm(self, size_bytes: int) -> None:
        """Has each slot of the memory between them touched once."""
        for _ in range(SLOTS):
            self._there_and_back(size_bytes)

    def round(self, large: int) -> tuple[float, float]:
        """Seconds one way of a small message, and of a large one."""
        self._there_and_back(SMALL_BYTES)  # both are there then
        return self._there_and_back(SMALL_BYTES), self._there_and_back(large)

    def _there_and_back(self, size_bytes: int) -> float:
        message = Message((self._sent[:size_bytes],))
        begin_s = time.perf_counter()
        if self._leads:
            self._transport.send(self._address, message, self._timeout_s)
        self._transport.receive(self._address, self._timeout_s)
        if not self._leads:
            self._transport.send(self._address, message, self._timeout_s)
        return (time.perf_counter() - begin_s) / 2
