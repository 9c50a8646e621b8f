"""Loops that are ahead of their passes: as in one process, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.distributed.cases.lookahead_cases import (
    LOOPS,
    Look,
    accumulated,
    alone,
    held_at_the_end,
    iterated_twice,
    on_ranks,
)
from tests.distributed.cases.tasks import difference, identical
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

EQUAL = (16,) * 7
EXACT = [
    *[Look(loop) for loop in LOOPS],
    *[Look(loop, sizes=EQUAL) for loop in ("one ahead", "groups of 3")],
    *[Look(loop, "sam") for loop in ("plain", "one ahead", "groups of 3")],
    *[Look(loop, "chunks") for loop in ("plain", "one ahead", "groups of 3")],
    *[Look(loop, "views") for loop in ("plain", "groups of 3", "listed")],
    *[Look("plain", body) for body in ("gan", "labels kept", "everywhere")],
    *[Look(loop, "normalised") for loop in ("one ahead", "listed")],
    *[Look(loop, policy="sync, sums") for loop in ("one ahead", "groups of 3")],
    *[Look(loop, policy="sync, weighed") for loop in ("one ahead", "groups of 3")],
]


def test_passes_are_weighed_as_their_own_batches(ranks2: RankPool) -> None:
    found = ranks2.serve(on_ranks, EXACT, timeout_s=200)
    for look, *each in zip(EXACT, *found, strict=True):
        assert [one.error for one in each] == ["", ""], look
        assert identical([one.state for one in each]), look
        assert difference(each[0].state, alone(look)) <= 1e-13, look


UNCLEAR = "ConfigError: the loop fetched batches ahead, or skipped some, and elche"
SWAP = r"ConfigError: .*\bswap the two lines, loss\.backward\(\) first"
REFUSED = [
    (Look("one ahead", "labels kept"), UNCLEAR),
    (Look("one ahead", "nothing kept"), UNCLEAR),
    (Look("groups of 3", "labels kept"), UNCLEAR),
    (Look("listed", "labels kept"), UNCLEAR),
    (Look("one ahead", "gan"), UNCLEAR),
    (Look("one ahead", policy="cadence"), SWAP),
    (Look("groups of 3", policy="async"), SWAP),
    (Look("listed", policy="cadence"), SWAP),
    (Look("listed", policy="async"), SWAP),
    (Look("groups of 3", policy="gradients"), SWAP),
    (Look("listed", "labels kept", policy="async"), UNCLEAR),
    (Look("plain", "peeked, backward", policy="async"), SWAP),
    (Look("plain", "peeked, backward", policy="gradients"), SWAP),
    # Ranks that run other passes are told what to write.
    *(
        (Look("plain", body, sizes=EQUAL), r"ConfigError: .*if elche\.any\(is_bad\)")
        for body in ("far apart", "last ones", "alone at the end", "uneven inside")
    ),
]


@pytest.mark.parametrize(("look", "says"), REFUSED)
def test_a_pass_of_an_unknown_batch_is_refused(
    ranks2: RankPool, look: Look, says: str
) -> None:
    for [one] in ranks2.serve(on_ranks, [look]):
        assert re.search(says, one.error), one.error


def test_a_batch_may_be_looked_at_before_the_loop(ranks2: RankPool) -> None:
    looks = [Look("plain", "peeked", policy) for policy in ("cadence", "async")]
    for found in ranks2.serve(on_ranks, looks):
        assert [each.error for each in found] == ["", ""]


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_loader_is_iterated_once_at_a_time(ranks2: RankPool, policy: str) -> None:
    """An iterator that the next one has ended would yield nothing more, as if through.

    So ``zip(loader, loader)`` trained nothing, without a word.
    """
    for told in ranks2.serve(iterated_twice, policy):
        assert re.search("ConfigError: the loader is iterated twice", told), told


@pytest.mark.parametrize("policy", ["sync", "async"])
@pytest.mark.parametrize(
    ("case", "text"),
    [
        # ``next(it)`` a few times, then ``torch.save``: in windows a rank's own model.
        (held_at_the_end, "still held"),
        # The last group of batches.
        (accumulated, "took no optimizer step"),
    ],
)
def test_what_parts_ranks_in_windows_is_said(
    ranks2: RankPool, case: Callable[[str], list[str]], text: str, policy: str
) -> None:
    for lines in ranks2.serve(case, policy):
        said = [line for line in lines if text in line]
        assert len(said) == (policy == "async"), lines
