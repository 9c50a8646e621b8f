"""Sums over virtual hosts: what crosses between them, counted as it is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elche.comm.codec.codec import CODECS
from elche.comm.codec.codec_peers import GroupPeers
from elche.comm.codec.coded_exchange import CodedExchange
from tests.comm.averaging.cases.overlap_cases import joined
from tests.comm.codec.cases.codec_cases import leave, offered


@dataclass
class Crossed:
    """What a rank got, and sent to ranks on other hosts, of each of two ways."""

    flat: torch.Tensor
    by_hosts: torch.Tensor
    flat_bytes: int = 0
    by_hosts_bytes: int = 0


class CountingPeers:
    """Peers that count what they send to ranks of other hosts."""

    def __init__(self, peers: GroupPeers, hosts: tuple[str, ...]) -> None:
        self._peers = peers
        self._hosts = hosts
        self.rank, self.world_size = peers.rank, peers.world_size
        self.ranks = peers.ranks
        self.crossed = 0

    def send_async(self, memory: torch.Tensor, to: int, tag: int) -> Any:
        if self._hosts[to] != self._hosts[self.rank]:
            self.crossed += memory.numel()
        return self._peers.send_async(memory, to, tag)

    def receive_async(self, memory: torch.Tensor, source: int, tag: int) -> Any:
        return self._peers.receive_async(memory, source, tag)

    def wait(self, work: Any, what: str) -> None:
        self._peers.wait(work, what)

    def look_out(self, ready: Callable[[], bool], what: str) -> None:
        self._peers.look_out(ready, what)


def both_ways(codec: str, numel: int) -> Crossed:
    """The same messages summed with and without knowledge of the hosts."""
    with joined("gloo") as group:
        hosts = group.hosts()
        assert group.hosts() is hosts
        found = []
        for tag, known in ((0, ()), (2, hosts)):
            peers = CountingPeers(GroupPeers(group), hosts)
            exchange = CodedExchange(peers, CODECS[codec], numel + 1, tag, known)
            exchange.contribution(0).copy_(offered(group.rank, 0, numel))
            exchange.begin(0)
            found.append((exchange.finish("a test").clone(), peers.crossed))
            leave(group, exchange)
            if known:
                assert exchange.remote_bytes == peers.crossed
    (flat, flat_bytes), (by_hosts, by_hosts_bytes) = found
    return Crossed(flat, by_hosts, flat_bytes, by_hosts_bytes)
