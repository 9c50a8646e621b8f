"""A replica is lost with one of its ranks; the others repeat the step, exactly."""

from __future__ import annotations

import re

import pytest
import torch

from tests.harness.fenced import run_fenced, survivors_of
from tests.pipeline.cases.pipeline_death_cases import (
    CLIP,
    COMPUTING,
    END,
    MICRO_BATCHES,
    OUTPUTS,
    SOME,
    STEPS,
    Deaths,
    alone,
    dying,
)

pytestmark = [pytest.mark.distributed, pytest.mark.faults]


def check(ranks: int, deaths: Deaths, victims: list[int]) -> None:
    """The survivors have what one process has, and each batch counts once."""
    expected = alone()
    found = survivors_of(*run_fenced(ranks, dying, deaths), victims)
    assert [one.rank for one in found] == list(range(ranks - len(victims)))
    for one in found:
        assert one.replicas == len(found) * deaths.replicas // ranks
        assert one.steps == STEPS
        assert one.losses == pytest.approx(expected.losses, rel=1e-12)
        assert one.norms == pytest.approx(expected.norms, rel=1e-12)
        assert one.evaluated == pytest.approx(expected.evaluated, rel=1e-12)
        for name, value in expected.state.items():
            assert (one.state[name] - value).abs().max() <= 1e-12, name
        for name, value in found[0].state.items():
            assert torch.equal(one.state[name], value), name
        passes = {float(v) for n, v in one.state.items() if n.endswith("passes")}
        assert passes == {STEPS * MICRO_BATCHES}


def test_replicas_split_the_batch() -> None:
    check(4, Deaths(), [])


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (3, COMPUTING),
        (0, COMPUTING),
        (3, OUTPUTS),
        (1, "the begin of step"),
        (0, "the begin of step" + SOME),
        (2, END),
        (0, END),
        (0, END + SOME),
        (3, CLIP),
        (0, CLIP + SOME),
    ],
)
@pytest.mark.every(3)
def test_a_death_in_a_step(rank: int, where: str) -> None:
    replica = [0, 1] if rank < 2 else [2, 3]
    check(4, Deaths(at={rank: (3, where)}), replica)


def test_a_death_in_a_call_that_is_not_repeated() -> None:
    deaths = Deaths(at={3: (STEPS - 1, "the begin of evaluate")})
    outcomes, _ = run_fenced(4, dying, deaths)
    for one in outcomes[:2]:
        assert one.error is not None
        assert re.search(r"ranks \[2, 3\] were lost during a call", one.error.text)


def test_two_deaths_until_one_rank_is_left() -> None:
    at = {0: (1, CLIP + SOME), 2: (4, COMPUTING)}
    check(3, Deaths(replicas=3, schedule="zb-h1", at=at), [0, 2])


def test_buffers_are_averaged_after_a_death_behind_the_last_step() -> None:
    check(3, Deaths(replicas=3, at={0: (STEPS - 1, CLIP)}), [0])
