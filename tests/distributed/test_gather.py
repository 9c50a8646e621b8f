"""`elche.gather`, `any`, `print` and `progress` in loops on two ranks."""

from __future__ import annotations

import contextlib
import io
from typing import Any
from unittest import mock

import pytest
import torch

import elche
from elche.monitor.progress import TaskProgress
from elche.session import output
from tests.distributed.cases.tasks import Task, begin, take_step
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

TASK = Task(samples=49, batch_size=16, epochs=1)
"""The last batch has one sample: of two ranks one gets none."""


class Bar(TaskProgress):
    """Keeps what it is told."""

    all: tuple[Bar, ...] = ()

    def start(self, task: str, total: float | None) -> None:
        self.total, self.task, self.is_closed = total, task, False
        Bar.all += (self,)

    def update(self, task: str, done: float, detail: str = "") -> None:
        self.done = done

    def finish(self, task: str, detail: str = "") -> None:
        self.is_closed = True


def gather_in_the_loop() -> dict[str, Any]:
    found: dict[str, Any] = {"order": [], "any": []}
    model, optimizer, loader = begin(TASK)
    rank = elche.rank()
    for number, (x, y, index, _) in enumerate(loader):
        rows = elche.gather({"y": y, "parts": [index, x.double() + rank * 0]})
        found["order"].append(rows["parts"][0].tolist())
        assert rows["parts"][1].shape == (len(rows["y"]), 6)
        found["any"].append(elche.any(number == 2 and rank == 1))
        elche.barrier()
        take_step(model, optimizer, x, y)
    rows = torch.arange(rank * 2)[:, None] + 10 * rank
    found["unequal"] = elche.gather(rows).tolist()
    found["numbers"] = elche.gather(torch.tensor(0.5 + rank)).tolist()
    found["names"] = (elche.any(rank == 0), elche.any(False))
    elche.shutdown()
    return found


def test_rows_of_unequal_ranks_come_in_order(ranks2: RankPool) -> None:
    both = ranks2.serve(gather_in_the_loop, env=FOUR_TO_ONE)
    assert both[0] == both[1]
    found = both[0]
    assert [len(batch) for batch in found["order"]] == [16, 16, 16, 1]
    assert sorted(i for batch in found["order"] for i in batch) == list(range(49))
    assert found["any"] == [False, False, True, False]
    assert found["unequal"] == [[10], [11]]
    assert found["numbers"] == [0.5, 1.5]
    assert found["names"] == (True, False)


CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (elche.gather, (torch.ones(1),)),
    (elche.any, (True,)),
    (elche.barrier, ()),
]


def refuse_in_windows() -> None:
    _, _, loader = begin(TASK, policy="cadence")
    try:
        for _ in loader:
            for call, given in CALLS:
                with pytest.raises(elche.ConfigError, match=r"inside the loop would w"):
                    call(*given)
            break
    finally:
        elche.shutdown()


def test_windows_refuse_them_by_name(ranks2: RankPool) -> None:
    ranks2.serve(refuse_in_windows)


def show(policy: str) -> tuple[list[Any], str]:
    out, Bar.all = io.StringIO(), ()
    with (
        mock.patch.object(output, "TaskProgress", Bar),
        contextlib.redirect_stdout(out),
    ):
        model, optimizer, loader = begin(TASK, policy=policy)
        for epoch in range(2):
            for x, y, *_ in elche.progress(loader, desc=f"epoch {epoch}"):
                take_step(model, optimizer, x, y)
                elche.print("in", epoch, sep="-")
                if epoch:
                    break
        elche.print("end", sep="-", end="!")
        elche.shutdown()
    shown = [(bar.task, bar.total, bar.done, bar.is_closed) for bar in Bar.all]
    return shown, out.getvalue()


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_one_bar_counts_the_samples_of_all(ranks2: RankPool, policy: str) -> None:
    first, second = ranks2.serve(show, policy, env=FOUR_TO_ONE)
    (whole, broken), printed = first
    assert whole == ("epoch 0", 49, 49, True)
    assert (broken[0], broken[3]) == ("epoch 1", True)
    assert broken[2] < 49
    assert {*printed.splitlines()} == {"in-0", "in-1", "end!"}
    assert second == ([], "")
