"""Lightning's Trainer and Fabric on two unequal devices, beside one device alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.integrations.fabric import ElcheFabricStrategy
from elche.integrations.lightning import ElcheStrategy
from elche.integrations.rank_strategy import RankStrategy
from tests.ddp.cases.ddp_cases import meeting, torch_world
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool
from tests.integrations.cases.lightning_fit import Regression, loaders
from tests.integrations.programs import printed

CASES = Path(__file__).parent / "cases"
SPEEDS = ("-m", "elche", "run", "--speeds", "1,0.3", "--ms-per-sample", "0.3")
pytestmark = pytest.mark.distributed


def run(*arguments: str) -> list[list[str]]:
    """The words of the lines that a script printed."""
    return [line.split() for line in printed(*arguments).splitlines()]


def assert_same(shared: list[list[str]], alone: list[list[str]]) -> None:
    """The same figures, and on rank 1 the same number of steps."""
    from_1 = [line for line in shared if line[1:3] == ["steps", "1"]]
    steps = [line for line in shared if line[1:3] == ["steps", "0"]]
    assert [line[3] for line in from_1] == [line[3] for line in steps]
    first = [line for line in shared if line not in from_1]
    assert [line[:2] for line in first] == [line[:2] for line in alone]
    for one, other in zip(first, alone, strict=True):
        rounding = 2e-3 if one[0] == "bf16" else 1e-5
        figures = [list(map(float, line[2:])) for line in (one, other)]
        assert figures[0] == pytest.approx(figures[1], rel=rounding), one


def test_the_trainer_in_every_way() -> None:
    script = str(CASES / "lightning_fit.py")
    alone = run(script, "auto")
    assert len(alone) == 4 * 10
    assert_same(run(*SPEEDS, script, "elche"), alone)
    assert run(script, "elche", "plain") == alone[:4]


def test_fabric_and_a_stateful_loader() -> None:
    script = str(CASES / "fabric_loop.py")
    alone = run(script, "auto")
    assert len(alone) == 4
    assert_same(run(*SPEEDS, script, "elche"), alone)


def exchanged() -> dict[str, Any]:
    """What two ranks exchange, each in every way."""
    with torch_world():
        return exchanged_in_world(this_place().rank)


def exchanged_in_world(rank: int) -> dict[str, Any]:
    ranks = RankStrategy()
    ranks.take_rank("a test", {"timeout_s": 30.0}, None, None)
    mine = torch.tensor([rank + 1, 5])
    with pytest.raises(elche.ConfigError, match=r"the ranks' are \[\[1\], \[2\]\]"):
        ranks.all_gather(torch.zeros(rank + 1))
    with pytest.raises(elche.ConfigError, match="stacks equal tensors"):
        ranks.all_gather(mine, sync_grads=True)
    if rank == 0:
        with pytest.raises(elche.ConfigError, match="are broadcast, got object"):
            ranks.broadcast(object())
    with pytest.raises(elche.ConfigError, match="mean, sum, min or max"):
        ranks.reduce(mine, None, "median")
    ranks.barrier()
    return {
        "mean": ranks.reduce(mine).tolist(),
        "sum": ranks.reduce(mine, None, torch.distributed.ReduceOp.SUM).tolist(),
        "max": ranks.reduce(mine, None, "max").tolist(),
        "other": ranks.reduce("text"),
        "rows": ranks.all_gather(mine).tolist(),
        "said": ranks.broadcast({"path": ["a", None, 2.5]} if rank == 0 else None),
        "from 1": ranks.broadcast(f"rank {rank}", 1),
        "all": ranks.reduce_boolean_decision(rank == 1),
        "any": ranks.reduce_boolean_decision(rank == 1, False),
    }


def test_what_ranks_exchange(ranks2: RankPool) -> None:
    places = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    first, second = ranks2.run(exchanged, case_setup=meeting, env=places)
    assert first == second
    assert first == {
        "mean": [1.5, 5.0],
        "sum": [3, 10],
        "max": [2, 5],
        "other": "text",
        "rows": [[1, 5], [2, 5]],
        "said": {"path": ["a", None, 2.5]},
        "from 1": "rank 1",
        "all": False,
        "any": True,
    }


@pytest.mark.parametrize("strategy", [ElcheStrategy, ElcheFabricStrategy])
def test_windows_are_refused(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(elche.ConfigError, match="under policy 'async' ranks run"):
        strategy(policy="async")
    with pytest.raises(elche.ConfigError, match="remove leave_out=True"):
        strategy(leave_out=True)
    monkeypatch.setenv("ELCHE_POLICY", "auto")
    with pytest.raises(elche.ConfigError, match="under policy 'auto' ranks run"):
        strategy()


@pytest.mark.filterwarnings("ignore")
def test_what_the_trainer_is_refused() -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "max_epochs": 2}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    train, _ = loaders(True)
    for data, others, error in (
        ({"a": train, "b": train}, {}, "one training DataLoader for the whole"),
        (
            [(torch.ones(2, 6), torch.ones(2, 1))],
            {},
            "DataLoader to train on, got Tensor",
        ),
        (train, {"reload_dataloaders_every_n_epochs": 1}, "one training DataLoader"),
    ):
        with pytest.raises(elche.ConfigError, match=error):
            Trainer(strategy="elche", **quiet, **others).fit(Regression(), data)
    elche.shutdown()


def test_what_fabric_is_refused() -> None:
    fabric = Fabric(strategy="elche", accelerator="cpu", devices=1)
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(elche.ConfigError, match=r"expected fabric.setup\(model"):
        fabric.setup_dataloaders(loader)
    fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(elche.ConfigError, match="once, with the one DataLoader"):
        fabric.setup_dataloaders(loader, loader)
    with pytest.raises(elche.ConfigError, match="expected one model in"):
        fabric.setup(torch.nn.Linear(1, 1))
    elche.shutdown()


def test_the_example() -> None:
    lines = run(*SPEEDS, "examples/lightning_module.py")
    shown = [line for line in lines if line[0] == "epoch"]
    assert [line[1] for line in shown] == ["0:", "1:", "2:", "3:", "4:"]
    assert float(shown[-1][4].removesuffix("%")) > 85
