"""Messages in shared memory: in parts or whole, and never overwritten unread."""

from __future__ import annotations

import itertools
import mmap
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.transport.exchange import Exchange, GlooExchange, SharedExchange
from elche.comm.transport.shared_memory import map_together
from elche.errors import CommunicationError, ProtocolError
from tests.comm.bus import Bus

CPU = torch.device("cpu")


def shared(world_size: int, numel: int, sides: int = 1) -> list[SharedExchange]:
    """The ranks' ends of one exchange, in one process."""
    size_bytes = SharedExchange.size_bytes(
        world_size, numel, torch.float32, sides * world_size
    )
    memory = mmap.mmap(-1, size_bytes)
    return [
        SharedExchange(
            group, memory, range(group.world_size), (numel, torch.float32), sides
        )
        for group in Bus(world_size).groups()
    ]


def by_gloo(world_size: int, numel: int, sides: int = 1) -> list[GlooExchange]:
    return [
        GlooExchange(group, numel, torch.float32, CPU, sides)
        for group in Bus(world_size).groups()
    ]


@pytest.mark.parametrize("make", [shared, by_gloo])
@given(
    world_size=st.integers(2, 4),
    edges=st.lists(st.integers(0, 10), max_size=3).map(sorted),
)
def test_the_sum_in_parts_is_the_sum(
    make: type, world_size: int, edges: list[int]
) -> None:
    ends: list[Exchange] = make(world_size, 10)
    for number in range(3):
        for rank, end in enumerate(ends):
            end.contribution(0).copy_(torch.arange(10.0) * (rank + number))
            assert rank == 0 or not ends[0].poll()
            end.begin(0)
        times = sum(rank + number for rank in range(world_size))
        for end in ends:
            assert end.poll()
            end.wait("a test")
            found = torch.zeros(10)
            cuts = [0, *edges, 10]
            for start, stop in itertools.pairwise(cuts):
                end.sum_into(start, stop, found[start:stop])
            end.release()
            assert found.tolist() == [i * times for i in range(10)]


def test_a_contribution_in_shared_memory_outlives_its_sum() -> None:
    first, second = shared(2, 4)
    for end, value in ((first, 1.0), (second, 2.0)):
        end.contribution(0).fill_(value)
        end.begin(0)
    assert first.keeps_contribution
    assert first.finish("a test").tolist() == [3.0] * 4
    assert first.contribution(0).tolist() == [1.0] * 4


@pytest.mark.parametrize("sides", [1, 2])
def test_what_is_not_read_is_not_overwritten_unnoticed(sides: int) -> None:
    first, second = shared(2, 4, sides)
    for number in range(sides):
        for end in (first, second):
            end.begin(number)
        first.finish("a test")
    with pytest.raises(
        ProtocolError,
        match=rf"rank 0 wrote message {sides + 1} before ranks .1. had read message 1,",
    ):
        first.begin(0)


def test_one_side_is_reclaimed_when_all_have_read_it() -> None:
    first, second, third = shared(3, 4)
    first.reclaim("a test")
    for end in (first, second, third):
        end.begin(0)
    for end in (first, third):
        end.finish("a test")
    with pytest.raises(CommunicationError, match=r"a test; ranks that did .* 1$"):
        first.reclaim("a test")
    second.finish("a test")
    first.reclaim("a test")
    first.begin(0)


class Dying:
    """A group in which a rank dies while memory is shared."""

    rank, world_size = 0, 2

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        raise CommunicationError("a rank has died")


def test_no_file_stays_open_where_a_rank_dies_while_memory_is_shared() -> None:
    group: Any = Dying()
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CommunicationError, match="a rank has died"):
        map_together(group, 64)
    assert len(os.listdir("/proc/self/fd")) <= files  # of others may be closed


def test_a_sum_may_be_asked_for_again_when_another_rank_has_gone_on() -> None:
    """It was summed once more then, from slots that hold the next message."""
    ends = shared(2, 4)
    for value, end in enumerate(ends, 1):
        end.contribution(0).fill_(value)
        end.begin(0)
    for end in ends:
        assert torch.equal(end.finish("a test"), torch.full((4,), 3.0))
    ends[1].reclaim("a test")
    ends[1].contribution(0).fill_(9.0)
    ends[1].begin(0)
    assert torch.equal(ends[0].finish("a test"), torch.full((4,), 3.0))
