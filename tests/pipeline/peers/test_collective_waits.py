"""Waiting for a collective in short looks: through, failed, or not yet."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elche.errors import CommunicationError, DeadlineError
from elche.pipeline.peers import waits
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
    group: Any = SimpleNamespace(point_to_point=None)
    placement = Placement(world_size=2, device=torch.device("cpu"))
    return StagePeers(placement, channel, group, "pipeline/1")


def test_a_sum_that_comes_as_a_look_gives_up_is_through() -> None:
    work = EndsAsALookGivesUp(2)
    made().wait(work, (0, 1), "the sum", 60.0)
    assert work.looked == 3


def test_a_failure_that_comes_as_a_look_gives_up_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "REASON_WITHIN_S", 0.0)
    work = EndsAsALookGivesUp(2, "Connection closed by peer")
    with pytest.raises(CommunicationError, match="for the sum: Connection closed"):
        made().wait(work, (0, 1), "the sum", 60.0)


def test_a_sum_that_does_not_come_names_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    one = made()
    monkeypatch.setattr(one.waits, "_publish", told.append)
    monkeypatch.setattr(one.waits, "_waits_of", lambda rank: "")
    with pytest.raises(DeadlineError, match="for rank 1: the sum; rank 1 is late"):
        one.wait(EndsAsALookGivesUp(10**9), (0, 1), "the sum", 0.0)
    assert told == ["1 the sum"]
