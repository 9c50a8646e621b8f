"""Averaging, overlapped and not, against the algorithm written out plainly."""

from __future__ import annotations

import math

import pytest
import torch

from tests.comm.averaging.cases.overlap_cases import (
    Script,
    Seen,
    blocking,
    many_windows,
    meeting,
    overlapped,
    poisoned,
    simulate,
)
from tests.distributed.cases.tasks import identical
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

TRANSPORTS = ("shared", "gloo")
THREE = Script(
    steps=(4, 2, 1),
    lag=(3, 0, 1),
    weights=(
        (0.5, 0.25, 0.25),
        (0.5, 0.5, 0.0),
        (0.0, 0.0, 0.0),
        (0.0, 0.0, 1.0),
        (1 / 3, 1 / 3, 1 / 3),
    ),
)
SCRIPTS = {
    "average": Script(),
    "nesterov": Script(outer="nesterov", momentum=0.9),
    "slowmo": Script(outer="slowmo", momentum=0.6),
    "tied": Script(model="tied", outer="nesterov"),
    "frozen": Script(model="frozen"),
    "half": Script(model="half"),
}


def assert_same(found: list[Seen], expected: list[Seen], tolerance: float) -> None:
    for seen, known in zip(found, expected, strict=True):
        assert seen.divergences == pytest.approx(known.divergences, rel=tolerance)
        assert seen.norms == pytest.approx(known.norms, rel=tolerance)
        assert seen.state.keys() == known.state.keys()
        for name, value in seen.state.items():
            torch.testing.assert_close(
                value,
                known.state[name],
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
            )


def assert_identical(found: list[Seen]) -> None:
    states = [
        {name: value for name, value in seen.state.items() if name != "mask"}
        for seen in found
    ]
    assert identical(states)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_overlapped_averaging_keeps_the_steps_taken_meanwhile(
    ranks2: RankPool, transport: str, name: str
) -> None:
    script = SCRIPTS[name]
    found = ranks2.run(overlapped, script, transport, case_setup=meeting)
    assert_identical(found)
    tolerance = {"half": 2e-2, "tied": 1e-5}.get(name, 1e-12)
    assert_same(found, simulate(script), tolerance)
    assert min(found[0].divergences) > 0.01


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("outer", ["average", "nesterov", "slowmo"])
def test_ranks_without_work_send_nothing_and_stay_with_the_others(
    ranks3: RankPool, transport: str, outer: str
) -> None:
    script = Script(THREE.steps, THREE.lag, THREE.weights, outer=outer)
    found = ranks3.run(overlapped, script, transport, case_setup=meeting)
    assert_identical(found)
    assert_same(found, simulate(script), 1e-12)
    assert found[2].divergences[1] == 0.0
    steps = sum(len(script.steps_of(r, w)) for r in range(3) for w in range(5))
    assert int(found[0].state["1.num_batches_tracked"]) == steps == 4 + 2 + 1 + 6 + 8


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_blocking_averaging(ranks2: RankPool, transport: str, name: str) -> None:
    known = SCRIPTS[name]
    script = Script(
        lag=(0, 0), model=known.model, outer=known.outer, momentum=known.momentum
    )
    found = ranks2.run(blocking, script, transport, case_setup=meeting)
    assert_identical(found)
    tolerance = {"half": 2e-2, "tied": 1e-5}.get(name, 1e-12)
    assert_same(found, simulate(script), tolerance)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blocking_averaging_with_ranks_without_work(
    ranks3: RankPool, transport: str
) -> None:
    script = Script(THREE.steps, (0, 0, 0), THREE.weights, outer="nesterov")
    found = ranks3.run(blocking, script, transport, case_setup=meeting)
    assert_identical(found)
    assert_same(found, simulate(script), 1e-12)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_whose_parameters_are_no_numbers_comes_back_to_the_others(
    ranks3: RankPool, transport: str
) -> None:
    found = ranks3.run(poisoned, transport, case_setup=meeting)
    assert [each["is_finite"] for each in found] == [True, True, False]
    assert math.isnan(found[2]["divergence"])
    assert all(0 < each["divergence"] < 1 for each in found[:2])
    for name, value in found[2]["state"].items():
        if name != "mask":
            assert torch.isfinite(value).all()
            torch.testing.assert_close(value, found[0]["state"][name])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_of_many_windows_do_not_run_into_each_other(
    ranks2: RankPool, transport: str
) -> None:
    found = ranks2.run(many_windows, transport, 300, case_setup=meeting)
    expected, total = [], 0.0
    for window in range(300):
        total += 1.0 + window % 3
        expected.append(total)
    assert found == [expected, expected]
