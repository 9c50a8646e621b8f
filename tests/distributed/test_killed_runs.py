"""Runs that are killed or told to end, and started again: nothing lost or doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.cases.resume_cases import train, train_until_killed
from tests.distributed.cases.tasks import Task, identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "cases" / "killed_script.py"
UNEQUAL = [
    {"ELCHE_SPEED": "1", "ELCHE_MS_PER_SAMPLE": "1"},
    {"ELCHE_SPEED": "0.5", "ELCHE_MS_PER_SAMPLE": "1"},
]
ROOT = Path(__file__).parents[2]


def start(
    folder: Path, policy: str, epochs: int, samples: int, every_s: float, *more: str
) -> subprocess.Popen[str]:
    """The script on two ranks, with a process group of its own."""
    options = f"--speeds 1,0.5 --policy {policy} --resume --checkpoint-dir {folder}"
    words = [*options.split(), "--checkpoint-every", str(every_s), str(SCRIPT)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "elche", "run", *words),
            *(str(folder), str(epochs), str(samples), *more),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def wait_for_batches(process: subprocess.Popen[str], count: int) -> int:
    """Reads so many batches of a run, or to its end; returns how many there were."""
    assert process.stdout is not None
    for number in range(count):
        if not process.stdout.readline():
            return number
    return count


def assert_once(folder: Path, epochs: int, samples: int) -> None:
    pairs: list[tuple[int, int]] = []
    for rank in range(2):
        pairs += map(tuple, json.loads((folder / f"seen{rank}.json").read_text()))
    assert Counter(pairs) == Counter(
        {(epoch, at): 1 for epoch in range(epochs) for at in range(samples)}
    )


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_sigterm_makes_a_last_checkpoint(policy: str, tmp_path: Path) -> None:
    """The run ends with 143, and goes on from there."""
    process = start(tmp_path, policy, 2, 400, 600.0)
    assert wait_for_batches(process, 12) == 12
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert not (tmp_path / "end.pt").exists()
    assert len(list(tmp_path.glob("checkpoint-*/manifest.json"))) == 1
    again = start(tmp_path, policy, 2, 400, 600.0)
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert_once(tmp_path, 2, 400)


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
