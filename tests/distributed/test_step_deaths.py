"""Ranks that die under ``sync``: the others go on as one process would have.

Of several hosts, whose gradients are summed there first, too.
"""

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
from tests.distributed.cases.deaths import HOST_PLACES, PART_PLACES, Death
from tests.distributed.cases.step_deaths import (
    BATCH,
    Loop,
    Trained,
    reference,
    steps_of,
    train,
)
from tests.distributed.cases.tasks import identical
from tests.harness.fenced import run_fenced, survivors_of

pytestmark = pytest.mark.distributed

GLOO = {"transport": {"kind": "gloo", "bucket_cap_mb": 0.0002}}
WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "gloo": {"options": GLOO},
    "hosts": {"ranks": 4, "hosts": "aabb"},
}
SHARED_OR_GLOO = pytest.mark.parametrize("options", [{}, GLOO], ids=["shared", "gloo"])
NEAR = WAYS["shared"], WAYS["gloo"]
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


LEADERS_ALONE = {"summing a host", "host summed", "handing on"}
LATE: dict[str, Any] = {"ranks": 4, "late": 1, "late_at": 4}
"""A rank lacks the sums that another one has, of the step after which a rank dies."""
LATE_OF_A_HOST = {**LATE, "hosts": "aabb", "clip": 0.1}
PASSES: dict[str, Any] = {"passes": 2, "epochs": 1}
PAUSE: dict[str, Any] = {"saves_at": 3, "samples": 1200, "step_s": 0.004}
ORDERED = {"_end_first": 1, "ordered": 1, "_reorder": 1, "built": 4}
"""While buckets are ordered, or made in that order, which are two."""
OF_HOSTS = {"ranks": 4, "hosts": "abba"}
CASES: list[tuple[Death, dict[str, Any]]] = [
    *((Death(2, place, 4), {}) for place in ("forward", "backward", "step")),
    *((Death(2, place, 4), {"early": True}) for place in ("fetched", "last bucket")),
    # Also where their holder has changed sums in place meanwhile.
    (Death(2, "step", 4), {**LATE, "clip": 0.1, "options": GLOO}),
    (Death(2, "step", 4), {**LATE, "clip": 0.1}),
    (Death(2, "step", 4), {**LATE, "early": True, "options": GLOO}),
    (Death(2, "step", 4), {**LATE, "clip": 0.1, "parts": True}),
    (Death(2, "step", 4), {**LATE, "early": True}),
    *((Death(2, "step", 4), {**LATE, "loss": loss}) for loss in ("sum", "weighted")),
    # The pause has begun, also for one that reads both at once: it takes part in it.
    (Death(2, "pausing", 1), {**PAUSE, "together": 1}),
    (Death(3, "step", 4), {**LATE_OF_A_HOST, "late": 1}),
    # From a host that has begun with the next, and changed these in place.
    (Death(3, "step", 4), {**LATE_OF_A_HOST, "late": 2}),
    # In the first backward pass.
    *((Death(2, *each), way) for each in ORDERED.items() for way in NEAR),
    # Its samples are in the passes of the step that have closed, and count.
    (Death(2, "closed", 5), {**PASSES, "is_apart": True}),
    (Death(2, "passed", 5), {**PASSES, "is_apart": True}),
    (Death(2, "closed", 6), PASSES),
    (Death(2, "last bucket", 6), {**PASSES, "is_apart": True}),
    (Death(2, "backward", 5), PASSES),
    *((Death(2, "last bucket", 4), {"loss": loss}) for loss in ("weighted", "sum")),
    # A buffer that is first written in the step goes in a message of its own.
    (Death(2, "last bucket", 4), {"late_buffer": 4, **WAYS["gloo"]}),
    (Death(2, "buffers", 6), {"late_buffer": 4, **WAYS["gloo"]}),
    # One that leads no host, a leader, the first rank.
    (Death(3, "offered", 6), WAYS["hosts"]),
    (Death(2, "handing on", 6), WAYS["hosts"]),
    (Death(0, "host summed", 7), WAYS["hosts"]),
]
LOOPS: list[dict[str, Any]] = [
    {"workers": 2},
    {"optimizers": 2},
    {"loss": "weighted", "accumulate": 2},
    *(
        {**hosts, **more}
        for hosts in ({}, {**OF_HOSTS, "rank": 1}, {**OF_HOSTS, "rank": 2})
        for more in (
            *({"accumulate": 3}, {"clip": 0.1}, {"scaler": True}),
            {"early": True, "workers": 1},
        )
    ),
    *({**OF_HOSTS, "loss": loss} for loss in ("weighted", "sum")),
]


@pytest.mark.parametrize(("death", "more"), CASES, ids=str)
@pytest.mark.every(2)
def test_a_death_is_outlived(
    death: Death, more: dict[str, Any], tmp_path: Path
) -> None:
    assert outlive(tmp_path, death, **more) == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", LOOPS, ids=str)
def test_loops(more: dict[str, Any], tmp_path: Path) -> None:
    places = {"offered": 8} if "hosts" in more else {"forward": 5, "backward": 5}
    outlive_each(tmp_path, places | {"step": 5}, **more)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_deaths_in_the_first_backward_pass(way: str, tmp_path: Path) -> None:
    places = {**ORDERED, "first bucket": 2, "last bucket": 1, "closed": 1, "passed": 1}
    outlive_each(tmp_path, places, rank=2, **WAYS[way])


def test_the_death_of_a_host_is_outlived(tmp_path: Path) -> None:
    deaths = Death(2, "forward", 4), Death(3, "forward", 4)
    assert outlive(tmp_path, *deaths, **WAYS["hosts"]) == 0


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


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.every(2)
def test_a_loop_may_leave_the_epoch_in_which_a_rank_has_died(
    ranks: int, tmp_path: Path
) -> None:
    """Before that pauses: all have run what they had begun."""
    loop = Loop(str(tmp_path), deaths=(Death(1, "forward", 4),), leaves=True)
    survivors: list[Trained] = survivors_of(*run_fenced(ranks, train, loop), [1])
    assert identical([each.state for each in survivors])
    for each in survivors:
        first, second = each.samples
        assert 3 * BATCH < first <= 4 * BATCH
        assert second == loop.samples
        assert each.progress == first + second


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more",
    [
        *({"ranks": ranks, "early": early} for ranks in (2, 4) for early in (0, 1)),
        *({"loss": loss} for loss in ("weighted", "sum")),
    ],
    ids=str,
)
@SHARED_OR_GLOO
def test_deaths_at_every_place(
    options: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    places = {"fetched": 4} if more.get("early") else {"between": 1, "_reorder": 1}
    outlive_each(tmp_path, PLACES | places, options=options, **more)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_deaths_at_every_place_of_a_host(rank: int, tmp_path: Path) -> None:
    places = HOST_PLACES.keys() - (LEADERS_ALONE if rank % 2 else set())
    for at in (6, 7):  # another bucket
        (folder := tmp_path / str(at)).mkdir()
        outlive_each(folder, dict.fromkeys(places, at), rank, **WAYS["hosts"])


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("way", ["gloo", "hosts"])
def test_a_death_while_sums_are_handed_over(way: str, at: int, tmp_path: Path) -> None:
    """Who has them still has them when another group has been formed."""
    deaths = Death(2, "step", 4), Death(3, "taken over", at)
    assert outlive(tmp_path, *deaths, **{**WAYS[way], **LATE}) == 0


@pytest.mark.slow
@SHARED_OR_GLOO
def test_two_deaths(options: dict[str, Any], tmp_path: Path) -> None:
    for number, (place, at) in enumerate(
        [("forward", 6), ("regrouping", 1), ("formed", 1), ("forward", 5)]
    ):
        (folder := tmp_path / str(number)).mkdir()
        deaths = Death(2, "forward", 4), Death(1, place, at)
        outlive(folder, *deaths, ranks=4, options=options)


@pytest.mark.slow
def test_what_is_left_of_the_last_step_is_one_more(tmp_path: Path) -> None:
    assert outlive(tmp_path, Death(2, "forward", 8)) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_deaths_at_random_moments(way: str, tmp_path: Path) -> None:
    draws = random.Random(way)
    places = ["forward", "backward", "closed", "step"]
    for number in range(16):
        (folder := tmp_path / str(number)).mkdir()
        is_timed = number % 2 == 0 or way == "hosts"
        more = {**WAYS[way], "ranks": 4, "step_s": 0.03 * is_timed}
        if way == "hosts":
            more["hosts"] = draws.choice(["aabb", "aaab", "abbb", "abab", "aabc"])
        victims = draws.sample(range(way != "hosts", 4), draws.choice((1, 2)))
        times = sorted(draws.sample(range(1, 16), len(victims)))
        deaths = [
            Death(rank, "time", at / 40)
            if is_timed
            else Death(rank, draws.choice(places), at)
            for rank, at in zip(victims, times, strict=True)
        ]
        print(deaths, more)
        outlive(folder, *deaths, **more)


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


def test_a_loop_that_fetches_early_is_cut(tmp_path: Path) -> None:
    """It does not wait for the grant that none is to come of."""
    more = {"saves_at": 5, "samples": 600, "step_s": 0.02, "epochs": 1}
    assert outlive(tmp_path, ranks=2, early=True, **more) == 0


@pytest.mark.slow
def test_sums_that_accumulate_are_refused_inside_a_pass(tmp_path: Path) -> None:
    """What was there before cannot be told from what a rank has added, multiplied."""
    more = {"loss": "sum", "accumulate": 2, "options": (("timeout_s", 60.0),)}
    loop = Loop(str(tmp_path), deaths=(Death(2, "last bucket", 4),), **more)
    outcomes, lost = run_fenced(3, train, loop)
    assert lost == [2]
    said = [str(each.error) for each in outcomes if each.rank != 2]
    assert all("accumulates gradients of summed losses" in s for s in said), said
