"""What those have who are at the end of a run that ranks have joined."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
import torch

from tests.distributed.cases.counting import counts_of, handed
from tests.distributed.cases.joining_cases import Growing, Grown, alone, grow
from tests.distributed.cases.step_deaths import steps_of
from tests.distributed.cases.tasks import identical
from tests.harness.fenced import run_fenced


def ended(growth: Growing, *fails: int) -> list[Grown]:
    """The run's ranks, checked by what loops were handed, by the model, and by elche.

    Args:
        growth: the run.
        fails: ranks that end with an error, beside those that die.
    """
    ranks = growth.founders + growth.joiners
    outcomes, lost = run_fenced(ranks, grow, growth, joiners=growth.joiners)
    victims = [*(death.rank for death in growth.deaths), *fails]
    errors = {each.rank: each.error for each in outcomes if each.error}
    others = [error for rank, error in errors.items() if rank not in victims]
    assert not others, "\n".join(map(str, others))
    assert {*errors} == {*victims}, "a fault did not happen"
    assert {*lost} <= {*victims}
    living: list[Grown] = [each.value for each in outcomes if each.rank not in victims]
    first = living[0]
    assert identical([each.state for each in living])
    assert identical([each.copy for each in living])
    assert len({each.rate for each in living}) == 1
    assert [each.place for each in living] == list(range(len(living)))
    assert {each.world_size for each in living} == {len(living)}
    assert {each.metrics for each in living} == {growth.samples}
    expected = float(growth.samples * first.epochs)
    assert {(e.progress, e.epochs) for e in living} == {(expected, first.epochs)}
    counted = handed(growth.folder, ranks)
    assert len(counted) == growth.samples * first.epochs
    assert victims or {*counted.values()} == {1}, "handed out twice, and nobody died"
    newcomers = living[len(living) - len({*growth.newcomers} - {*victims}) :]
    assert all(each.batches for each in newcomers)
    if growth.policy == "sync":
        check_steps(growth, first, victims)
    else:
        counts = counts_of(first.state, growth.policy)
        assert counts == [first.epochs] * growth.samples
        for each in newcomers:  # its own hand-over first, and those of later ones
            assert each.handed
            assert each.handed == first.handed[-len(each.handed) :]
        if growth.policy != "auto":
            steps = growth.samples * first.epochs // growth.batch
            assert first.rate == pytest.approx(0.97 ** (steps // 7), abs=0.0)
    return living


def check_steps(growth: Growing, first: Grown, victims: list[int]) -> None:
    """One process that takes the same steps ends with the same model."""
    if growth.accumulate > 1 or growth.freezes:
        return  # who joins is refused
    ranks = growth.founders + growth.joiners
    epochs = steps_of(growth.folder, ranks, victims, first.epochs)
    for steps in epochs:
        counts = Counter(chain.from_iterable(part for step in steps for part in step))
        assert counts == dict.fromkeys(range(growth.samples), 1)
    sizes = [[sum(map(len, step)) for step in steps] for steps in epochs]
    count, rest = divmod(growth.samples, growth.batch)
    whole = [*[growth.batch] * count, *[rest] * bool(rest)]
    if not any(death.rank < growth.founders for death in growth.deaths):
        changed = [each for each in sizes if each != whole]
        assert len(changed) <= len(growth.deaths), sizes
    state, copy, rate = alone(growth, epochs)
    for found, wanted in ((first.state, state), (first.copy, copy)):
        for name, value in wanted.items():
            if not name.endswith("trace"):  # which each rank writes on its own batches
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    assert first.rate == pytest.approx(rate)
