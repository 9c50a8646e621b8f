"""What the core makes of updates that are not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elche.coordination.protocol.instructions import (
    Abort,
    GrantBatches,
    Instruction,
    OpenWindow,
    Reduce,
)
from elche.coordination.state import Coordinator
from tests.coordination.test_core import batch_done, closed, opened, plan_of, reduced


class Pair:
    """Two ranks under ``cadence``, of which rank 0 trains, a batch in each window."""

    def __init__(self, non_finite: str = "stop") -> None:
        options = {"anchor": 4, "max_anchor": 4, "non_finite": non_finite}
        self.core: Coordinator
        self.core, told = opened(plan_of("cadence", **options))
        self.told: list[Instruction] = []
        self._leased: list[int] = []
        self._take(told)
        self.window = -1

    def _take(self, told: list[Instruction]) -> None:
        self.told += told
        for one in told:
            if isinstance(one, GrantBatches) and one.rank == 0:
                self._leased += range(one.start, one.stop)

    def run(self, *, norm: float = 1.0, **changes: Any) -> list[Instruction]:
        """A window that rank 0 closes so; what the core told."""
        self.window, self.told = self.window + 1, []
        batch = batch_done(0, self._leased.pop(0), window=self.window)
        ends = replace(closed(0, self.window), **changes)
        results = [
            replace(reduced(r, self.window), parameter_norm=norm) for r in (0, 1)
        ]
        for event in (batch, closed(1, self.window), ends, *results):
            self._take(self.core.handle(event, 1.0))
            self.core.check()
        return self.told

    def most_batches(self) -> int | None:
        """How many rank 0 is to run in the window that was opened last."""
        found = [o for o in self.told if isinstance(o, OpenWindow) and o.rank == 0]
        return found[-1].max_batches


LOST, IDLE = {"is_finite": False}, {"has_moved": False}


def test_windows_are_of_one_batch_until_an_update_is_finite() -> None:
    """One of which no step has come says neither."""
    pair = Pair("leave_out")
    most = []
    for way in ({}, IDLE, LOST, LOST, IDLE, {}, {}):
        pair.run(**way)
        most.append(pair.most_batches())
    assert [each == 1 for each in most] == [False, False, *[True] * 3, False, False]


def test_a_discarded_update_has_no_weight() -> None:
    plans = [one for one in Pair().run(**LOST) if isinstance(one, Reduce)]
    assert [plan.weight for plan in plans] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("ways", "stops"),
    [
        ((LOST, LOST), True),
        ((LOST, IDLE, IDLE, LOST), True),
        ((LOST, {}, LOST, {}, LOST), False),
        ((IDLE, LOST), False),
    ],
)
def test_the_second_in_a_row_ends_the_run(
    ways: tuple[dict[str, bool], ...], stops: bool
) -> None:
    pair = Pair()
    for way in ways:
        told = pair.run(**way)
    aborts = [one for one in told if isinstance(one, Abort)]
    assert bool(aborts) == stops
    for one in aborts:
        assert (one.kind, one.failed_rank) == ("non_finite", 0)
        assert "the update of rank 0 was not finite twice in a row" in one.reason
        assert sum(stop - start for start, stop in one.batches) == len(ways)


@pytest.mark.parametrize("non_finite", ["stop", "leave_out"])
@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_common_parameters_that_are_lost_end_every_run(
    non_finite: str, norm: float
) -> None:
    aborts = [one for one in Pair(non_finite).run(norm=norm) if isinstance(one, Abort)]
    assert {one.kind for one in aborts} == {"non_finite"}
    assert {one.failed_rank for one in aborts} == {0}
    assert {len(one.batches) for one in aborts} == {1}
    assert "rank 0 holds non-finite parameters after window 0" in (aborts[0].reason)
