"""Waits for what was sent end with the word of a death, or as gloo says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch

from elche.comm.codec import codec_peers
from elche.comm.codec.codec_peers import GroupPeers
from elche.comm.transport.exchange import wait_until
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, RankLostError

DEADLINE_S = 60.0


class Sent:
    """What gloo says of a message that it sends."""

    def __init__(self, error: str = "") -> None:
        self.is_received = threading.Event()
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        assert self.is_received.wait(timeout.total_seconds())
        if self._error:
            raise RuntimeError(self._error)


class Watched:
    """A group whose ranks may hear of a death."""

    rank, world_size, ranks, timeout_s = 0, 2, range(2), DEADLINE_S
    is_watched = True

    def __init__(self, work: Sent) -> None:
        self.work = work
        self.lost = ""

    @property
    def point_to_point(self) -> Watched:
        return self

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Sent:
        return self.work

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        wait_until(ready, self._check, lambda: RuntimeError(what), DEADLINE_S)

    def _check(self) -> None:
        if self.lost:
            raise RankLostError(self.lost)


def sending(work: Sent) -> tuple[Watched, GroupPeers, Any]:
    group = Watched(work)
    peers = GroupPeers(cast(Group, group))
    return group, peers, peers.send_async(torch.zeros(3), 1, 0)


def held_of(group: Watched) -> int:
    return len(codec_peers._pending[cast(Group, group)])


def test_a_flush_ends_when_a_rank_has_died() -> None:
    """And what gloo may still read stays."""
    group, peers, work = sending(Sent())
    group.lost = "rank 1 died"
    with pytest.raises(RankLostError, match="rank 1 died"):
        peers.flush(work, "a test")
    assert held_of(group) == 1
    group.work.is_received.set()  # the thread that waits ends


def test_what_was_received_is_let_go() -> None:
    group, peers, work = sending(Sent())
    threading.Timer(0.01, group.work.is_received.set).start()
    peers.flush(work, "a test")
    assert held_of(group) == 0


def test_a_flush_that_fails_says_why() -> None:
    group, peers, work = sending(Sent("the connection is gone"))
    group.work.is_received.set()
    with pytest.raises(CommunicationError, match="a test failed on rank 0: the conne"):
        peers.flush(work, "a test")
    assert held_of(group) == 1
