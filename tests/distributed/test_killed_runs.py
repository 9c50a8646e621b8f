"""Runs that are killed or told to end, and started again: nothing lost or doubled."""

from __future__ import annotations

import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.cases.resume_cases import train, train_until_killed
from tests.distributed.cases.tasks import Task, identical
from tests.harness.printing import started
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "cases" / "killed_script.py"
UNEQUAL = [
    {"ELCHE_SPEED": "1", "ELCHE_MS_PER_SAMPLE": "1"},
    {"ELCHE_SPEED": "0.5", "ELCHE_MS_PER_SAMPLE": "1"},
]


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_sigterm_makes_a_last_checkpoint(policy: str, tmp_path: Path) -> None:
    """The run ends with 143, and goes on from there."""
    words = f"-m elche run --speeds 1,0.5 --policy {policy} --checkpoint-every 600"
    words += f" --resume --checkpoint-dir {tmp_path}/all {SCRIPT} {tmp_path}"
    command = [sys.executable, *words.split()]
    with started(tmp_path, command) as [run]:
        run.wait_for("batch", 12)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143, run.output
    assert not [*tmp_path.glob("seen*")]
    assert len([*tmp_path.glob("all/checkpoint-*/manifest.json")]) == 1
    with started(tmp_path, command) as [run]:
        assert run.end() == 0, run.output
    pairs = [p for file in tmp_path.glob("seen*") for p in json.loads(file.read_text())]
    assert sorted(pairs) == [[epoch, at] for epoch in range(2) for at in range(400)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("policy", "is_inside"),
    [
        ("sync", True),
        ("cadence", True),
        ("async", True),
        ("cadence", False),
        ("async", False),
    ],
)
def test_twenty_kills_at_random_moments(
    policy: str, is_inside: bool, tmp_path: Path
) -> None:
    """It ends as a run that was never killed, bit for bit.

    But for windows with checkpoints inside epochs, each of which ends a window early.
    """
    options = {"policy": policy, "deterministic": True}
    epochs, samples = (3, 12000) if is_inside else (180, 200)  # more than the lives do
    task = Task(samples=samples, batch_size=8, epochs=epochs, options=options)
    draws, resumed = random.Random(policy), 0
    with RankPool(2) as pool:
        for kill in range(20):
            resumed += bool(list(tmp_path.glob("*/manifest.json")))
            victim, delay_s = draws.randrange(2), draws.uniform(0.1, 4.0)
            outcomes = pool.run(
                train_until_killed,
                *(task, str(tmp_path), victim, delay_s),
                case_setup=serve_in_thread,
                env=UNEQUAL,
                expect_failure=True,
                is_inside=is_inside,
            )
            assert outcomes[victim].error, kill
        ranks = pool.serve(*(train, task, str(tmp_path), (), None), timeout_s=600.0)
        assert resumed > 10
        assert ranks[0].epochs, "all was trained before the last kill"
        seen = Counter(pair for rank in ranks for pair in rank.pairs)
        pairs = ((e, at) for e in range(epochs) for at in range(samples))
        assert seen == Counter(dict.fromkeys(pairs, 1))
        assert identical([rank.state for rank in ranks])
        if policy == "sync" or not is_inside:
            whole = pool.serve(*(train, task, str(tmp_path / "whole")), timeout_s=600.0)
            assert identical([whole[0].state, ranks[0].state])
