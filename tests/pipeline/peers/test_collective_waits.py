"""Waiting for a collective in short looks: through, failed, or not yet."""

from __future__ import annotations

import time
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

    def waiting(self, kind: type) -> list[Any]:
        return []


class Ends:
    """A collective that is through at the last of some polls."""

    def __init__(self, polls: float, failure: str = "") -> None:
        self.polls, self.failure = polls, failure

    def poll(self) -> bool:
        self.polls -= 1
        return self.polls <= 0

    def end(self) -> None:
        assert self.polls <= 0, "a wait that might have lasted"
        if self.failure:
            raise RuntimeError(self.failure)


def wait(work: Ends, timeout_s: float, peers: StagePeers | None = None) -> None:
    made_now = peers or made()
    made_now.wait(work.poll, work.end, (0, 1), "the sum", timeout_s)


def made() -> StagePeers:
    channel: Any = Calm()
    group: Any = SimpleNamespace(native=None)
    placement = Placement(world_size=2, device=torch.device("cpu"))
    return StagePeers(placement, channel, group, "pipeline/1")


def test_a_sum_is_waited_for_until_it_is_through() -> None:
    work = Ends(5)
    wait(work, 60.0)
    assert work.polls == 0


def test_a_failed_sum_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "REASON_WITHIN_S", 0.0)
    with pytest.raises(CommunicationError, match="for the sum: Connection closed"):
        wait(Ends(2, "Connection closed by peer"), 60.0)


def test_a_sum_that_does_not_come_names_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    one = made()
    monkeypatch.setattr(one.waits, "_publish", told.append)
    monkeypatch.setattr(one.waits, "_waits_of", lambda rank: "")
    with pytest.raises(DeadlineError, match="for rank 1: the sum; rank 1 is late"):
        wait(Ends(float("inf")), 0.0, one)
    assert told == ["1 the sum"]


class Busy(Calm):
    """A coordinator that has another report of rank 1 each time, and then the last."""

    def __init__(self) -> None:
        self.texts = [b" layer 1", b" layer 2", b" layer 3"]

    def store_set(self, key: str, value: bytes) -> None:
        pass

    def store_forget(self, key: str) -> None:
        pass

    def store_get(self, key: str, timeout_s: float) -> bytes:
        return self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]


def test_a_rank_that_reports_is_waited_for() -> None:
    channel: Any = Busy()
    polls: list[float] = []

    def look() -> bool:
        polls.append(time.monotonic())
        time.sleep(0.01)
        return False

    with pytest.raises(DeadlineError, match=r"waited 0\.2 s .* rank 1 is late"):
        waits.Waits(channel, 0, "pipeline/1").until(look, [1], "the layers", 0.2)
    assert polls[-1] - polls[0] > 0.7, "until the last report, and its deadline"
