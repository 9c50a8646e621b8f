"""Whose backward pass it is where a process group serves several wrappers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from elche.ddp.turns import Turn, new_wrapper
from elche.errors import CommunicationError
from tests.comm.thread_group import on_ranks

RANKS = 2


def two_wrappers(group: Any) -> list[Turn]:
    return [Turn(group, new_wrapper(), number, "Net") for number in range(2)]


def begin_as_wrappers_go(group: Any, forgets_first: bool) -> list[int]:
    """Reductions so far, after passes of the first wrapper; the other one goes.

    A rank whose Python has not noticed yet keeps it for one pass longer.
    """
    first, second = two_wrappers(group)
    gone = weakref.ref(second)
    counts = []
    for number in range(4):
        if number == (1 if forgets_first else 2):
            del second
            gc.collect()
            assert gone() is None
        first.begin()
        counts.append(group.reductions)
    return counts


def test_a_wrapper_counts_until_it_is_gone_on_every_rank() -> None:
    counts = on_ranks(RANKS, begin_as_wrappers_go, [True, False])
    assert counts == [[1, 2, 3, 3]] * RANKS  # the third word says so, no fourth comes


def begin_with_another(group: Any) -> list[int]:
    """A wrapper is forgotten, and another one comes."""
    first, second = two_wrappers(group)
    del second
    gc.collect()
    first.begin()
    first.begin()
    third = Turn(group, new_wrapper(), 2, "Net")
    third.begin()
    first.begin()
    return [group.reductions]


def test_a_new_wrapper_counts_again() -> None:
    assert on_ranks(RANKS, begin_with_another) == [[3]] * RANKS


def rebuild(group: Any) -> int:
    """The turn of one wrapper is made anew while the old one is still there."""
    wrapper = new_wrapper()
    turns = [Turn(group, wrapper, 0, "Net") for _ in range(2)]
    turns[1].begin()
    return int(group.reductions)


def test_a_wrapper_that_is_built_anew_is_one() -> None:
    assert on_ranks(RANKS, rebuild) == [0] * RANKS


def begin_own(group: Any) -> str:
    """Each rank begins another wrapper's pass."""
    turns = two_wrappers(group)
    with pytest.raises(CommunicationError, match="ranks are out of step") as caught:
        turns[group.rank].begin()
    return str(caught.value)


def test_another_order_is_named() -> None:
    said = on_ranks(RANKS, begin_own)
    assert "rank 0 was reducing Net (wrapper 0), rank 1 wrapper 1" in said[0]
    assert "rank 1 was reducing Net (wrapper 1), rank 0 wrapper 0" in said[1]
