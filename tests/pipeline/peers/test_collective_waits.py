"""Waiting for a collective in short looks: through, failed, or not yet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from elche.errors import CommunicationError, DeadlineError
from elche.pipeline.peers import peers
from elche.pipeline.peers.peers import StagePeers
from elche.runtime.process.environment import Placement


class Calm:
    """A coordinator that knows of no failure."""

    def find_abort(self) -> None:
        return None


class EndsAsALookGivesUp:
    """Each of the first looks times out; the work ends just after the last of them."""

    def __init__(self, looks: int, failure: str = "") -> None:
        self.looks, self.failure = looks, failure
        self.looked = 0

    def is_completed(self) -> bool:
        return self.looked >= self.looks

    def wait(self, within: timedelta) -> None:
        was_over = self.is_completed()
        self.looked += 1
        if not was_over:
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)


def made() -> StagePeers:
    channel: Any = Calm()
    group: Any = None
    placement = Placement(world_size=2, device=torch.device("cpu"))
    return StagePeers(placement, channel, group, None, "pipeline/1")


def test_a_sum_that_comes_as_a_look_gives_up_is_through() -> None:
    work = EndsAsALookGivesUp(2)
    made().wait(work, (0, 1), "the sum", 60.0)
    assert work.looked == 3


def test_a_failure_that_comes_as_a_look_gives_up_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "REASON_WITHIN_S", 0.0)
    work = EndsAsALookGivesUp(2, "Connection closed by peer")
    with pytest.raises(CommunicationError, match=r"the sum failed: Connection closed"):
        made().wait(work, (0, 1), "the sum", 60.0)


def test_a_sum_that_does_not_come_names_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    one = made()
    monkeypatch.setattr(one._waits, "begin_all", lambda ranks, what: told.append(what))
    monkeypatch.setattr(one._waits, "explain_all", lambda ranks: "rank 1 is late")
    with pytest.raises(DeadlineError, match=r"waited 0\.0 s for the sum; rank 1 is"):
        one.wait(EndsAsALookGivesUp(10**9), (0, 1), "the sum", 0.0)
    assert told == ["the sum"]
