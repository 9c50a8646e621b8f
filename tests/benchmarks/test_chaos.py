"""The accounts of `benchmarks/chaos.py`: what agrees, and what is found out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks import chaos_killer
from benchmarks.chaos import (
    SAMPLES,
    ChaosConfig,
    RunAccount,
    lost,
    measure,
    missing,
    one_run,
    table,
)
from elche.errors import ConfigError
from elche.runtime.process.launch_config import LaunchResult
from tests.harness.printing import environment_of

GOOD = RunAccount(
    epochs=2,
    counted=(2, 3),
    samples=2 * SAMPLES + 5,
    progress=2.0 * SAMPLES + 5,
    checksums=["a", "a"],
)


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ranks, which compile nothing."""
    monkeypatch.setenv("PYTHONPATH", environment_of()["PYTHONPATH"])


def test_accounts_that_agree() -> None:
    assert GOOD.faults() == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"counted": (1, 3)}, "1 to 3 times in the model after 2 epochs"),
        ({"counted": (2, 4)}, "2 to 4 times in the model after 2 epochs"),
        ({"progress": 2.0 * SAMPLES}, f"{2 * SAMPLES + 5} samples in the model"),
        ({"missing": 3}, "3 positions were handed to no loop"),
        ({"checksums": ["a", "b"]}, "survivors hold different models"),
        ({"failure": "the run was lost"}, "the run was lost"),
    ],
)
def test_each_account_is_looked_at(changes: dict[str, object], says: str) -> None:
    (fault,) = replace(GOOD, **changes).faults()  # type: ignore[arg-type]
    assert says in fault


def test_positions_that_no_loop_was_handed() -> None:
    lines = [f"0 {' '.join(map(str, range(1, SAMPLES)))}", "0 1", "1 0"]
    assert missing(lines, 1) == 1


@pytest.mark.parametrize("changes", [{"minutes": 0.0}, {"mtbf_s": -1.0}, {"ranks": 1}])
def test_wrong_settings(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        ChaosConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codes", "kills", "said", "says"),
    [
        ((0, 137, 0), [1], [0, 2], ""),
        ((0, 137, 0), [], [0, 2], "codes {1: 137}"),
        ((0, 137, 1), [1], [0], "codes {2: 1}"),
        ((0, 137, 0), [1], [0], "ranks [2] said nothing"),
    ],
)
def test_only_ranks_that_were_killed_may_end_otherwise(
    codes: tuple[int, ...], kills: list[int], said: list[int], says: str
) -> None:
    living = sorted({0, 1, 2} - {*kills})
    found = lost(LaunchResult(codes, "", (), None), kills, living, said)
    assert says in found
    assert bool(found) == bool(says)


@pytest.mark.timeout(300)
def test_a_rank_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is taken again before the run ends, however long that takes."""
    monkeypatch.setattr(chaos_killer, "PATIENCE_S", 250.0)
    config = ChaosConfig(ranks=2, mtbf_s=3.0, policy="cadence")
    run = one_run(config, random.Random(1), 2.0, config.mtbf_s)
    assert not run.faults(), run
    assert run.kills, "nobody was killed"
    assert run.joins, "nobody has joined"
    assert len(run.checksums) == config.ranks


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["cadence", "async", "sync"])
def test_half_a_minute_of_chaos(policy: str) -> None:
    runs = measure(ChaosConfig(minutes=0.5, ranks=4, mtbf_s=4.0, policy=policy))
    assert any(run.kills for run in runs), "nobody was killed"
    assert any(run.joins for run in runs), "nobody has joined"
    assert not any(run.faults() for run in runs), table(runs)
