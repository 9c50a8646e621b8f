"""`elche.gather`, `any`, `print` and `progress` in loops on two ranks."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from typing import Any

import pytest
import torch

import elche
from tests.distributed.cases.tasks import Task, begin, take_step
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

TASK = Task(samples=49, batch_size=16, epochs=1)
"""The last batch has one sample: of two ranks one gets none."""


class Bar:
    """Stands for tqdm: keeps what it is told."""

    all: tuple[Bar, ...] = ()
    written: tuple[str, ...] = ()

    def __init__(self, **options: Any) -> None:
        self.options, self.n, self.is_closed = options, 0, False
        self.steps: list[int] = []
        Bar.all += (self,)

    def update(self, step: int) -> None:
        self.n += step
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True

    @staticmethod
    def write(text: str, file: Any, end: str) -> None:
        Bar.written += (text + end,)


@contextlib.contextmanager
def fake_tqdm() -> Any:
    module = types.ModuleType("tqdm.auto")
    module.tqdm = Bar  # type: ignore[attr-defined]
    names = {"tqdm": types.ModuleType("tqdm"), "tqdm.auto": module}
    kept = {name: sys.modules.get(name) for name in names}
    Bar.all, Bar.written = (), ()
    sys.modules.update(names)
    try:
        yield Bar
    finally:
        for name, before in kept.items():
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before


def gather_in_the_loop() -> dict[str, Any]:
    found: dict[str, Any] = {"order": [], "any": []}
    model, optimizer, loader = begin(TASK)
    rank = elche.rank()
    for number, (x, y, index, _) in enumerate(loader):
        rows = elche.gather({"y": y, "parts": [index, x.double() + rank * 0]})
        found["order"].append(rows["parts"][0].tolist())
        assert rows["parts"][1].shape == (len(rows["y"]), 6)
        found["any"].append(elche.any(number == 2 and rank == 1))
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


def refuse_in_windows() -> None:
    _, _, loader = begin(TASK, policy="cadence")
    try:
        for _ in loader:
            for call in (lambda: elche.gather(torch.ones(1)), lambda: elche.any(True)):
                with pytest.raises(elche.ConfigError, match=r"elche\.\w+ inside the l"):
                    call()
            break
    finally:
        elche.shutdown()


def test_windows_refuse_them_by_name(ranks2: RankPool) -> None:
    ranks2.serve(refuse_in_windows)


def show(policy: str) -> tuple[list[Any], str]:
    out = io.StringIO()
    with fake_tqdm() as bars, contextlib.redirect_stdout(out):
        model, optimizer, loader = begin(TASK, policy=policy)
        for epoch in range(2):
            for x, y, *_ in elche.progress(loader, desc=f"epoch {epoch}"):
                take_step(model, optimizer, x, y)
                elche.print("in", epoch, sep="-")
                if epoch:
                    break
        elche.print("end", sep="-", end="!")
        elche.shutdown()
    shown = [(bar.options, bar.n, bar.is_closed) for bar in bars.all]
    return [shown, set(bars.written)], out.getvalue()


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_one_bar_counts_the_samples_of_all(ranks2: RankPool, policy: str) -> None:
    first, second = ranks2.serve(show, policy, env=FOUR_TO_ONE)
    options = {"total": 49, "unit": "sample", "desc": "epoch 0"}
    (bars, written), printed = first
    assert bars[0] == (options, 49, True)
    assert (bars[1][0]["desc"], bars[1][2]) == ("epoch 1", True)
    assert bars[1][1] < 49
    assert (written, printed) == ({"in-0\n", "in-1\n"}, "end!")
    assert second == ([[], set()], "")
