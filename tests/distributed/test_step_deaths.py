"""Ranks that die under ``sync``: the others go on as one process would have."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from elche.comm.transport.host_exchange import spans_hosts
from elche.coordination.protocol.events import StepsDone
from elche.coordination.sync.left_out import ExcludedRanks, _Exclusion
from elche.coordination.sync.step_reports import RATE_MOVES
from elche.coordination.sync.sync_policy import SyncPolicy
from tests.distributed.cases.counting import rows_of
from tests.distributed.cases.deaths import PART_PLACES, Death
from tests.distributed.cases.step_deaths import (
    BATCH,
    Loop,
    Trained,
    leave_after,
    reference,
    steps_of,
    train,
)
from tests.distributed.cases.tasks import identical
from tests.harness.fenced import run_fenced, survivors_of

pytestmark = pytest.mark.distributed

GLOO = {"transport": {"kind": "gloo", "bucket_cap_mb": 0.0002}}
PLACES = {
    "load": 10,
    "forward": 4,
    "backward": 4,
    "first bucket": 10,
    "last bucket": 4,
    "closed": 4,
    "step": 4,
}


def outlive(
    tmp_path: Path,
    *deaths: Death,
    ranks: int = 3,
    is_apart: bool = False,
    hosts: str = "",
    **more: Any,
) -> int:
    """Checks what survivors have; returns steps beyond those of whole epochs.

    Args:
        tmp_path: a folder for logs.
        deaths: in the order in which they come.
        ranks: that begin.
        is_apart: of its last step a dead rank is only in the first backward pass.
        hosts: of the ranks, a letter each; "": one.
        more: of the loop.
    """
    options = {"timeout_s": 60.0, **more.pop("options", {})}
    loop = Loop(str(tmp_path), deaths=deaths, options=(*options.items(),), **more)
    env = [{"ELCHE_HOST": name} for name in hosts] or None
    outcomes, lost = run_fenced(ranks, train, loop, env=env)
    victims = [death.rank for death in deaths]
    survivors: list[Trained] = survivors_of(outcomes, lost, victims)
    assert identical([each.state for each in survivors])
    assert [each.place for each in survivors] == list(range(len(survivors)))
    assert {each.world_size for each in survivors} == {len(survivors)}
    assert all(each.by_hosts == spans_hosts(hosts) for each in survivors)
    assert {each.progress for each in survivors} == {float(loop.samples * loop.epochs)}
    epochs = steps_of(tmp_path, ranks, victims, loop.epochs)
    for steps in epochs:
        parts = chain.from_iterable(steps)
        counts = Counter(index for part in parts for index in part)
        assert counts == dict.fromkeys(range(loop.samples), 1)
    last = [rows_of(tmp_path, rank)[-1][-1] for rank in victims if is_apart]
    apart = [*chain.from_iterable(last)]
    for name, value in reference(loop, epochs, apart).items():
        if "trace" not in name or loop.passes == 1:
            found = survivors[0].state[name]
            close = 1e-12 if loop.samples < 400 else 1e-9  # rounding grows by steps
            torch.testing.assert_close(found, value, rtol=close, atol=close)
    whole = -(-loop.samples // BATCH)
    return sum(len(steps) - whole for steps in epochs)


def outlive_each(
    tmp_path: Path, places: Mapping[str, int], rank: int = 1, **more: Any
) -> None:
    """Runs in which a rank dies, each at another place, without a step more."""
    for place, at in places.items():
        (folder := tmp_path / place).mkdir()
        print(place, rank, more)
        assert outlive(folder, Death(rank, place, at), **more) == 0


@pytest.mark.parametrize(
    ("place", "early"),
    [
        *((place, False) for place in ("forward", "backward", "step")),
        *((place, True) for place in ("fetched", "last bucket")),
    ],
)
@pytest.mark.every(2)
def test_a_death_is_outlived(place: str, early: bool, tmp_path: Path) -> None:
    """Also by a loop that fetches the next batch early."""
    assert outlive(tmp_path, Death(2, place, 4), early=early) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"clip": 0.1},
        {"clip": 0.1, "parts": True},
        pytest.param({"clip": 0.1, "options": GLOO}, marks=pytest.mark.slow),
        pytest.param({"early": True}, marks=pytest.mark.slow),
        pytest.param({"early": True, "options": GLOO}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_who_lacks_sums_that_another_has_takes_them(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """Also where their holder has changed them in place meanwhile."""
    dead = Death(2, "step", 4)
    assert outlive(tmp_path, dead, ranks=4, late=1, late_at=4, **more) == 0


@pytest.mark.parametrize(
    ("place", "at"),
    [
        ("before its counter", 40),
        *(
            pytest.param(place, at, marks=pytest.mark.slow)
            for place in PART_PLACES
            for at in (20, 41)
        ),
    ],
)
def test_a_death_beside_a_part_of_a_sum(place: str, at: int, tmp_path: Path) -> None:
    assert outlive(tmp_path, Death(2, place, at), ranks=4, parts=True) <= 1


def test_a_pause_has_begun_when_a_rank_dies_in_it(tmp_path: Path) -> None:
    """Also for one that reads both at once: it takes part in the pause."""
    dead = Death(2, "pausing", 1)
    more = {"saves_at": 3, "together": 1, "samples": 1200, "step_s": 0.004}
    assert outlive(tmp_path, dead, **more) == 0


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.every(2)
def test_a_loop_may_leave_the_epoch_in_which_a_rank_has_died(ranks: int) -> None:
    """Before that pauses: all have run what they had begun."""
    loop = Loop("", deaths=(Death(1, "forward", 4),))
    outcomes, lost = run_fenced(ranks, leave_after, loop)
    assert lost == [1], "the fault did not happen"
    survivors = [each for each in outcomes if each.rank != 1]
    assert not [each.error for each in survivors if each.error]
    first, second = survivors[0].value
    assert all(each.value == survivors[0].value for each in survivors)
    assert 4 * BATCH < first[0] <= 5 * BATCH
    assert first[0] == first[1]
    assert second[:2] == (loop.samples, first[0] + loop.samples)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("early", [False, True], ids=["plain", "early"])
@pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_deaths_at_every_place(
    ranks: int, options: dict[str, Any], early: bool, tmp_path: Path
) -> None:
    places = {**PLACES, "fetched": 4} if early else {**PLACES, "between": 1}
    outlive_each(tmp_path, places, ranks=ranks, options=options, early=early)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2])
def test_a_death_while_sums_are_handed_over(at: int, tmp_path: Path) -> None:
    """Who has them still has them when another group has been formed."""
    deaths = Death(2, "step", 4), Death(3, "taken over", at)
    more = {"ranks": 4, "late": 1, "late_at": 4, "options": GLOO}
    assert outlive(tmp_path, *deaths, **more) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])
def test_two_deaths(options: dict[str, Any], tmp_path: Path) -> None:
    for number, (place, at) in enumerate(
        [("forward", 6), ("regrouping", 1), ("formed", 1), ("forward", 5)]
    ):
        (folder := tmp_path / str(number)).mkdir()
        deaths = Death(2, "forward", 4), Death(1, place, at)
        outlive(folder, *deaths, ranks=4, options=options)


@pytest.mark.slow
def test_a_stopped_rank_is_dead_for_good(tmp_path: Path) -> None:
    assert outlive(tmp_path, Death(2, "stopped", 0.1), step_s=0.03) <= 1


@pytest.mark.slow
def test_what_is_left_of_the_last_step_is_one_more(tmp_path: Path) -> None:
    assert outlive(tmp_path, Death(2, "forward", 8)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
@pytest.mark.parametrize(
    "more",
    [
        {"accumulate": 3},
        {"clip": 0.1},
        {"workers": 2},
        {"scaler": True},
        {"optimizers": 2},
        {"early": True, "workers": 1},
        {"loss": "weighted", "accumulate": 2},
        {"loss": "weighted", "options": GLOO},
        {"loss": "sum", "options": GLOO},
    ],
    ids=str,
)
def test_loops(place: str, more: dict[str, Any], tmp_path: Path) -> None:
    assert outlive(tmp_path, Death(1, place, 5), **more) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])
def test_deaths_at_random_moments(options: dict[str, Any], tmp_path: Path) -> None:
    draws = random.Random(repr(options))
    places = ["forward", "backward", "closed", "step"]
    for number in range(16):
        (folder := tmp_path / str(number)).mkdir()
        victims = draws.sample((1, 2, 3), draws.choice((1, 2)))
        times = sorted(draws.sample(range(1, 16), len(victims)))
        deaths = [
            Death(rank, draws.choice(places), at)
            if number % 2
            else Death(rank, "time", at / 40)
            for rank, at in zip(victims, times, strict=True)
        ]
        print(options, deaths)
        more = {"options": options, "step_s": 0.03 * (1 - number % 2)}
        outlive(folder, *deaths, ranks=4, **more)


def test_the_next_rank_reports_for_the_first_one(tmp_path: Path) -> None:
    loop = Loop(str(tmp_path), deaths=(Death(0, "between", 1),))
    outcomes, lost = run_fenced(3, train, loop)
    assert lost == [0]
    trained: Trained = outcomes[1].value
    layers = [trained.state[name] for name in trained.state if "layers" in name]
    norm = torch.cat([value.view(-1) for value in layers]).norm().item()
    assert trained.norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("is_final", [False, True], ids=["for now", "for good"])
@pytest.mark.parametrize(
    ("victim", "place", "at"),
    [
        (3, "apart", 15),  # more than are granted before the others are known apart
        pytest.param(2, "without, closing", 20, marks=pytest.mark.slow),
        pytest.param(2, "without", 20, marks=pytest.mark.slow),
        pytest.param(0, "without", 20, marks=pytest.mark.slow),
    ],
)
@pytest.mark.every(2)
def test_a_death_while_a_rank_is_left_out(
    victim: int,
    place: str,
    at: float,
    is_final: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lacks the model until what was begun is run; then all take part.

    Unless it has left for good.

    That the last rank brings nothing is not measured here.
    """

    def shorter(ranks: ExcludedRanks, step_s: float) -> _Exclusion | None:
        may_be = 3 in ranks._members
        return _Exclusion((3,), 1.0, 0.1) if may_be and not ranks.ranks else None

    monkeypatch.setattr(ExcludedRanks, "_shorter", shorter)
    if is_final:
        take = SyncPolicy._take

        def moved(policy: SyncPolicy, event: StepsDone) -> None:
            take(policy, replace(event, unknown=RATE_MOVES))

        monkeypatch.setattr(SyncPolicy, "_take", moved)
    options = {"leave_out": True, "epochs": 3}
    more = {"samples": 480, "epochs": 3, "step_s": 0.03}
    death = Death(victim, place, at)
    assert outlive(tmp_path, death, ranks=4, options=options, **more) == 0
    steps = [len(rows_of(tmp_path, rank)) for rank in (1, 3)]
    assert steps[1] < steps[0], "it was not left out"


@pytest.mark.slow
def test_a_death_where_others_come_back_to_steps_ends_the_run_by_name(
    tmp_path: Path,
) -> None:
    """Some have heard that a rank takes part again, and some have not."""
    deaths = Death(0, "step", 5), Death(2, "keys", 5)
    more = {"samples": 480, "epochs": 5, "slow": 3, "step_s": 0.03}
    options = ("leave_out", True), ("epochs", 5)
    loop = Loop(str(tmp_path), deaths=deaths, **more, options=options)
    outcomes, lost = run_fenced(4, train, loop)
    assert lost == [0]
    said = str(outcomes[1].error)
    assert "are being excluded from steps, or readmitted" in said
    assert "excluded: steps of" in said, "the first rank that lives says so"


ORDERED = {"_end_first": 1, "ordered": 1, "_reorder": 1, "built": 4}
"""While buckets are ordered, or made in that order, which are two."""
FIRST = {"first bucket": 2, "last bucket": 1, "closed": 1, "passed": 1}


@pytest.mark.parametrize(
    ("place", "at"),
    [
        *ORDERED.items(),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in FIRST.items()),
    ],
)
@pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])
@pytest.mark.every(3)
def test_a_death_in_the_first_backward_pass(
    place: str, at: int, options: dict[str, Any], tmp_path: Path
) -> None:
    assert outlive(tmp_path, Death(2, place, at), options=options) == 0


def test_a_loop_that_fetches_early_is_cut(tmp_path: Path) -> None:
    """It does not wait for the grant that none is to come of."""
    more = {"saves_at": 5, "samples": 600, "step_s": 0.02, "epochs": 1}
    assert outlive(tmp_path, ranks=2, early=True, **more) == 0


@pytest.mark.parametrize(
    ("place", "at", "is_apart"),
    [
        ("passed", 5, True),
        ("closed", 5, True),
        ("last bucket", 6, True),
        ("closed", 6, False),
        ("backward", 5, False),
    ],
)
@pytest.mark.every(2)
def test_a_death_between_two_passes_of_a_step(
    place: str, at: int, is_apart: bool, tmp_path: Path
) -> None:
    """Its samples are in the passes that have closed, and count."""
    death = Death(2, place, at)
    assert outlive(tmp_path, death, passes=2, epochs=1, is_apart=is_apart) == 0


@pytest.mark.parametrize("loss", ["weighted", "sum"])
def test_losses_weigh_as_in_one_process(loss: str, tmp_path: Path) -> None:
    assert outlive(tmp_path, Death(2, "last bucket", 4), loss=loss) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])
@pytest.mark.parametrize("loss", ["weighted", "sum"])
def test_losses_at_every_place(
    loss: str, options: dict[str, Any], tmp_path: Path
) -> None:
    more: dict[str, Any] = {"loss": loss, "options": options}
    places = {**PLACES, "between": 1, "closed": 1, "_reorder": 1}
    outlive_each(tmp_path, places, **more)
    (folder := tmp_path / "late").mkdir()
    more = {**more, "ranks": 4, "late": 1, "late_at": 4}
    assert outlive(folder, Death(2, "step", 4), **more) == 0


@pytest.mark.slow
def test_sums_that_accumulate_are_refused_inside_a_pass(tmp_path: Path) -> None:
    """What was there before cannot be told from what a rank has added, multiplied."""
    more = {"loss": "sum", "accumulate": 2, "options": (("timeout_s", 60.0),)}
    loop = Loop(str(tmp_path), deaths=(Death(2, "last bucket", 4),), **more)
    outcomes, lost = run_fenced(3, train, loop)
    assert lost == [2]
    said = [str(each.error) for each in outcomes if each.rank != 2]
    assert all("accumulates gradients of summed losses" in s for s in said), said


@pytest.mark.parametrize(
    ("place", "at"), [("last bucket", 4), ("buffers", 6)], ids=["all", "second message"]
)
def test_a_buffer_is_first_written_in_the_step(
    place: str, at: int, tmp_path: Path
) -> None:
    """It goes in a message of its own, after those that were written before."""
    more = {"late_buffer": 4, "options": GLOO}
    assert outlive(tmp_path, Death(2, place, at), **more) == 0
