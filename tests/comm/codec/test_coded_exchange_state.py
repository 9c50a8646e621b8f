"""Residuals change when a sum is adopted, and only then; they outlive an exchange."""

from __future__ import annotations

import pytest
import torch

from elche.comm.averaging.averager_state import blank, misfit_of
from elche.comm.codec.codec import CODECS
from elche.comm.codec.coded_exchange import CodedExchange
from elche.errors import CommunicationError, MismatchError, ProtocolError
from tests.comm.peers import exchanges, message, poll_all, summed


def failing(
    world_size: int, late: int, residuals: list[torch.Tensor]
) -> list[CodedExchange]:
    """A message that a slow rank holds up, given up by all that wait for it."""
    wire, ends = exchanges(world_size, CODECS["int4"], 301)
    wire.late.add(late)
    for rank, end in enumerate(ends):
        end.load_residual(residuals[rank])
        end.contribution(0).copy_(message(10 + rank, 300))
        end.begin(0)
    for end in ends:
        end.poll()
    for rank, end in enumerate(ends):
        if rank != late:
            with pytest.raises(
                CommunicationError, match=f"a test: the message of rank {late} failed"
            ):
                end.wait("a test")
            assert end.poll()
    return ends


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_failed_is_done_again_as_if_it_had_not_been(world_size: int) -> None:
    _, ends = exchanges(world_size, CODECS["int4"], 301)
    summed(ends, [message(rank, 300) for rank in range(world_size)])
    residuals = [end.residual.clone() for end in ends]
    broken = failing(world_size, world_size - 1, residuals)
    again = [message(10 + rank, 300) for rank in range(world_size)]
    expected = summed(ends, again)
    _, redone = exchanges(world_size, CODECS["int4"], 301)
    for old, new in zip(broken, redone, strict=True):
        new.load_residual(old.residual)
    found = summed(redone, again)
    assert all(torch.equal(each, expected[0]) for each in found)
    for one, other in zip(ends, redone, strict=True):
        assert torch.equal(one.residual, other.residual)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_that_nobody_adopts_leaves_residuals_alone(world_size: int) -> None:
    _, ends = exchanges(world_size, CODECS["int4"], 301)
    sent = [message(rank, 300) for rank in range(world_size)]
    for end, each in zip(ends, sent, strict=True):
        end.contribution(0).copy_(each)
        end.begin(0)
    poll_all(ends)
    first = torch.zeros(301)
    for end in ends:
        end.wait("a test")
        end.sum_into(0, 301, first)
        end.rollback()
        assert not bool(end.residual.any())
        with pytest.raises(ProtocolError, match=r"sum_into\(\) was called when no"):
            end.sum_into(0, 301, first)
    assert torch.equal(summed(ends, sent)[0], first)


def test_a_rank_that_failed_commits_what_another_one_had() -> None:
    wire, ends = exchanges(2, CODECS["int4"], 301)
    sent = [message(rank, 300) for rank in range(2)]
    for end, each in zip(ends, sent, strict=True):
        end.contribution(0).copy_(each)
        end.begin(0)
    ends[0].poll()  # sends its part of the sum
    wire.late.add(1)
    assert ends[1].has_sum
    with pytest.raises(CommunicationError, match="the message of rank 1 failed"):
        ends[0].wait("a test")
    ends[0].commit()
    ends[0].commit()
    _, others = exchanges(2, CODECS["int4"], 301)
    summed(others, sent)
    assert torch.equal(ends[0].residual, others[0].residual)


def test_no_rank_has_a_sum_while_a_part_of_it_is_missing() -> None:
    wire, ends = exchanges(3, CODECS["int4"], 301)
    for end in ends:
        end.contribution(0)[-1] = 1.0
    wire.late.add(2)
    for end in ends:
        end.begin(0)
    with pytest.raises(ProtocolError, match="this rank has not sent its part"):
        ends[0].commit()


def test_nothing_is_committed_before_anything_was_begun() -> None:
    _, ends = exchanges(2, CODECS["int8"], 11)
    with pytest.raises(ProtocolError, match=r"commit\(\) was called before"):
        ends[0].commit()


def test_one_message_is_under_way_at_a_time() -> None:
    _, ends = exchanges(2, CODECS["int8"], 11)
    ends[0].begin(0)
    with pytest.raises(ProtocolError, match=r"begin\(\) was called when a"):
        ends[0].begin(0)
    with pytest.raises(ProtocolError, match=r"load_residual\(\) was called when"):
        ends[0].load_residual(ends[1].residual)


def test_a_message_given_up_half_way_breaks_the_exchange() -> None:
    _, ends = exchanges(2, CODECS["int8"], 11)
    ends[0].begin(0)
    ends[0].rollback()
    with pytest.raises(CommunicationError, match="a message was dropped; open a"):
        ends[0].wait("a test")
    with pytest.raises(ProtocolError, match="a message failed or was dropped"):
        ends[0].begin(0)


def test_residuals_of_other_parameters_are_refused() -> None:
    _, ends = exchanges(2, CODECS["int8"], 11)
    _, others = exchanges(2, CODECS["int8"], 12)
    with pytest.raises(
        MismatchError, match=r"expected a residual of 10 elements, got \[11\]"
    ):
        ends[0].load_residual(others[0].residual)


@pytest.mark.parametrize("numel", [2, 35, 301])
def test_a_rank_that_owns_nothing_loads_what_it_saved(numel: int) -> None:
    """A message of fewer blocks than ranks."""
    _, ends = exchanges(4, CODECS["int8"], numel)
    summed(ends, [message(rank, numel - 1) for rank in range(4)])
    layouts = [("float32", numel - 1)]
    for end in ends:
        state = blank(layouts)
        state["groups"][0]["residual"] = end.residual
        assert misfit_of(state, layouts) == ""
