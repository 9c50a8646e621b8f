"""Tensors from device to device: what travels, what is waited for, and by whom.

Threads stand for ranks, and the CPU for their devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elche.comm.transport.device_group import TRIED_ELEMENTS
from elche.comm.transport.device_messages import trial
from elche.comm.transport.messages import BETWEEN_STEPS, Address, Message
from elche.errors import CommunicationError, DeadlineError
from tests.comm.transport.thread_link import TENSORS, Cable, check_whole, transports

DEADLINE_S = 30.0
NEVER = 10**9
WHAT = "the activation"


@contextmanager
def two(cable: Cable) -> Iterator[tuple[Any, Any]]:
    """Transports of two ranks; their threads end with them."""
    first, second = transports(2, cable)
    began_s = time.monotonic()
    try:
        yield first, second
    finally:
        threads = [*first._lines[1]._threads, *second._lines[0]._threads]
        first.close()
        second.close()
        assert time.monotonic() - began_s < DEADLINE_S
        assert len(threads) == 4
        assert not any(each.is_alive() for each in threads)


def passed(
    first: Any, second: Any, message: Message, tag: int = 1, timeout_s: float = 20.0
) -> Message:
    first.send(Address(1, tag, WHAT), message, timeout_s)
    found: Message = second.receive(Address(0, tag, WHAT), timeout_s)
    first.flush(timeout_s)
    return found


@pytest.mark.parametrize("by", ["host", "devices"])
def test_every_kind_of_tensor_comes_whole(by: str) -> None:
    cable = Cable()
    tag = 1 if by == "devices" else BETWEEN_STEPS
    with two(cable) as (first, second):
        found = passed(first, second, Message(TENSORS, ["t"]), tag)
        expected = len(TENSORS) if by == "devices" else 0
        assert second.devices.stream.marked == len(TENSORS)
    assert len(cable.carried) == max(0, expected - 1), "an empty one needs no way"
    check_whole(found)


def test_tensors_elsewhere_and_ranks_that_were_not_tried_take_the_host() -> None:
    cable = Cable()
    with two(cable) as (first, second):
        devices = first.devices
        here, elsewhere = torch.ones(1), torch.ones(1, device="meta")
        assert devices.serves(1, [here])
        assert not devices.serves(1, [here, elsewhere])
        assert not devices.serves(2, [here])
        assert not devices.serves(1, [])
        for one in (first, second):
            one.connect({}, replace(one.devices, partners=frozenset()))
        assert passed(first, second, Message((here,))).tensors[0].tolist() == [1.0]
    assert cable.carried == []


def test_what_is_not_computed_is_not_begun_and_has_the_deadline() -> None:
    cable = Cable()
    with two(cable) as (first, second):
        first.devices.stream.looks = NEVER
        with pytest.raises(DeadlineError, match=r"waited 1\.0 s for \[0\]: the act"):
            passed(first, second, Message((torch.ones(1),)), timeout_s=1.0)
        assert second.devices.stream.marked == 0
        with pytest.raises(DeadlineError, match=r"for \[1\]: sent messages to be"):
            first.flush(0.1)
    assert not cable.waiting, "a device received what was not there"


def test_a_transfer_that_does_not_end_has_the_deadline() -> None:
    cable = Cable(looks=NEVER)
    with two(cable) as (first, second):
        with pytest.raises(DeadlineError, match=r"waited 1\.0 s for \[0\]: the act"):
            passed(first, second, Message((torch.ones(1),)), timeout_s=1.0)
        assert cable.carried == [(0, 1)]


def test_what_the_receiver_has_not_agreed_to_is_named() -> None:
    with two(Cable()) as (first, second):
        second.connect({})
        words = "rank 0 sends from device to device, but this rank has not agreed"
        with pytest.raises(CommunicationError, match=words):
            passed(first, second, Message((torch.ones(1),)))


class Wire:
    """What a trial sends and receives; `given` is what comes from each rank."""

    def __init__(self, given: dict[int, float]) -> None:
        self.given = given
        self.told: list[tuple[str, int]] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.told.append(("to", rank))
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        assert tensors[0].shape == (TRIED_ELEMENTS,)
        self.told.append(("from", rank))
        return SimpleNamespace(wait=lambda: tensors[0].fill_(self.given[rank]))


def test_a_trial_takes_pairs_in_one_order_and_sees_what_is_wrong() -> None:
    group = cast("Any", SimpleNamespace(rank=1))
    cpu = torch.device("cpu")
    wire = Wire({0: 1.0, 2: 3.0})
    assert trial({2, 0})(wire, group, cpu) == ""
    assert wire.told == [("from", 0), ("to", 0), ("to", 2), ("from", 2)]
    wrong = trial({2, 0})(Wire({0: 1.0, 2: 9.0}), group, cpu)
    assert wrong == "expected 3.0 of rank 2, got 9.0"
