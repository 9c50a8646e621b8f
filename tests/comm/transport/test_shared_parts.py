"""Sums in shared memory of which each rank sums a part."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.transport import exchange as transport
from elche.comm.transport.exchange import SharedExchange, open_exchange
from tests.comm.bus import Bus
from tests.comm.joined import meeting
from tests.comm.thread_group import on_ranks
from tests.comm.transport.cases.part_sums import (
    COUNT,
    DTYPES,
    PLACES,
    messages_of,
    summed,
    whole_sum,
)
from tests.harness.rank_pool import RankPool

NUMEL = 1003


def ends_of(
    ranks: int, numel: int, dtype: torch.dtype = torch.float32, sides: int = 1
) -> list[SharedExchange]:
    """The ranks' ends of one exchange, in one process."""
    size_bytes = SharedExchange.size_bytes(ranks, numel, dtype, sides * ranks + 1)
    memory = mmap.mmap(-1, size_bytes)
    return [
        SharedExchange(group, memory, range(ranks), (numel, dtype), sides, 1)
        for group in Bus(ranks).groups()
    ]


def write(ends: Sequence[SharedExchange], sent: Sequence[torch.Tensor]) -> None:
    for end, message in zip(ends, sent, strict=True):
        end.contribution(0).copy_(message)
        end.begin(0)


@given(
    ranks=st.integers(4, 9),
    numel=st.integers(1, 2000),
    dtype=st.sampled_from(DTYPES),
    cuts=st.lists(st.integers(0, 2000), max_size=3),
    late=st.sets(st.integers(0, 8)),
)
def test_bits_are_those_of_the_whole_sum(
    ranks: int, numel: int, dtype: torch.dtype, cuts: list[int], late: set[int]
) -> None:
    """Also where parts are late, and read in any pieces."""
    ends = ends_of(ranks, numel, dtype)
    bounds = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    for number in range(2):
        sent = messages_of(ranks, numel, dtype, number)
        write(ends, sent)
        for rank, end in enumerate(ends):
            if rank not in late:
                end.poll()
        for end in ends:
            found = torch.zeros(numel, dtype=dtype)
            for start, stop in itertools.pairwise(bounds):
                end.sum_into(start, stop, found[start:stop])
            assert torch.equal(found, whole_sum(sent))
        for end in ends:
            end.release()


@given(
    ranks=st.integers(4, 64), numel=st.integers(1, 5000), dtype=st.sampled_from(DTYPES)
)
def test_parts_cover_a_message_once(ranks: int, numel: int, dtype: torch.dtype) -> None:
    part = ends_of(ranks, numel, dtype)[0]._part
    assert ranks * part >= numel
    assert part * dtype.itemsize % transport.aligned(1) == 0  # no line of two writers
    assert (part - 1) * ranks * dtype.itemsize < numel * dtype.itemsize + 64 * ranks


@pytest.mark.parametrize(("ranks", "less", "sums"), [(3, -1, 0), (4, 1, 0), (4, 0, 1)])
def test_small_messages_and_groups_are_summed_whole(
    ranks: int, less: int, sums: int
) -> None:
    numel = transport.LEAST_BYTES // (4 * ranks) - less

    def opened(group: Any) -> tuple[int, int]:
        exchange = open_exchange(group, numel, torch.float32, torch.device("cpu"))
        assert isinstance(exchange, SharedExchange)
        return len(exchange._sums), exchange.extra_bytes

    found = on_ranks(ranks, opened, shares_host=True)
    assert found == [(sums, sums * numel)] * ranks  # a quarter of the message each


def test_a_part_is_read_from_the_rank_that_summed_it() -> None:
    ends = ends_of(4, NUMEL)
    write(ends, [torch.ones(NUMEL)] * 4)
    for end in ends:
        end.poll()
    assert ends[0].poll()
    ends[0]._sums[0].fill_(7.0)
    assert ends[3].finish("a test").eq(7.0).all()


def test_a_part_without_its_counter_is_not_read() -> None:
    """Its rank may have died while it was summing it."""
    ends = ends_of(4, NUMEL)
    write(ends, [torch.ones(NUMEL)] * 4)
    ends[1].poll()
    ends[0]._sums[0][2 * ends[0]._part :].fill_(torch.nan)
    assert ends[0].finish("a test").eq(4.0).all()


def test_a_part_of_the_last_sum_is_not_read() -> None:
    ends = ends_of(4, NUMEL)
    for value in (1.0, 2.0):
        write(ends, [torch.full((NUMEL,), value)] * 4)
        if value == 1.0:
            for end in ends:
                end.poll()
        for end in ends:
            assert end.finish("a test").eq(4 * value).all()


def test_a_sum_that_a_rank_has_not_read_is_not_overwritten() -> None:
    """Two messages may be under way where there are two slots, but one sum."""
    ends = ends_of(4, NUMEL, sides=2)
    write(ends, [torch.ones(NUMEL)] * 4)
    for end in ends:
        end.poll()
    for end in ends[:3]:
        assert end.finish("a test").eq(4.0).all()
    for end in ends[:3]:
        end.contribution(1).fill_(2.0)
        end.begin(1)
    late = ends[3]
    found = torch.zeros(NUMEL)
    late.sum_into(NUMEL // 2, NUMEL, found[NUMEL // 2 :])
    late.contribution(1).fill_(2.0)
    late._written[3] = 2  # ahead of its own reading
    assert ends[0].finish("a test").eq(8.0).all()
    late.sum_into(0, NUMEL // 2, found[: NUMEL // 2])  # with the part of rank 0
    assert found.eq(4.0).all()


def test_late_parts_are_awaited_no_longer_than_to_sum_them_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = partial(next, iter([10.0, 10.1, 10.39, 10.41]))
    monkeypatch.setattr(transport, "time", SimpleNamespace(perf_counter=clock))
    end, *others = ends_of(4, NUMEL)
    end.begin(0)
    assert not end.poll()
    assert not end.has_sum
    for other in others:
        other.begin(0)
    assert end.has_sum  # it can be summed, so a death does not repeat it
    assert not end.poll()
    assert end.poll()


def test_a_rank_that_was_stopped_in_its_part_does_not_wait_as_long_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = partial(next, iter([10.0, 610.0, 610.5, 611.5]))
    monkeypatch.setattr(transport, "time", SimpleNamespace(perf_counter=clock))
    ends = ends_of(4, NUMEL)
    write(ends, [torch.ones(NUMEL)] * 4)
    assert not ends[0].poll()
    assert ends[0].poll()


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_sum_to_the_bit(ranks: int) -> None:
    with RankPool(ranks) as pool:
        found = pool.run(summed, "", 0, case_setup=meeting)
    assert {(why, sums) for why, _, sums in found} == {("", COUNT * len(DTYPES))}
    assert sum(parts for _, parts, _ in found) > 0, "no sum was made of parts"


@pytest.mark.distributed
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_is_killed_beside_its_part(place: str) -> None:
    """Sums that all had written are complete; the next names the dead rank."""
    with RankPool(4) as pool:
        outcomes = pool.run(summed, place, 2, case_setup=meeting, expect_failure=True)
    assert "exit code -9" in str(outcomes[2].error), "the fault did not happen"
    complete = PLACES[place] - (place == "before its contribution")
    for outcome in (outcomes[rank] for rank in (0, 1, 3)):
        why, _, sums = outcome.value
        assert why.endswith("ranks that did not arrive: 2")
        assert sums == complete
