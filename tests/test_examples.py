"""The examples and the README's loop run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.printing import ended

EXAMPLES = Path(__file__).parent.parent / "examples"
ELCHE = "-m", "elche", "run"
pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize("name", ["own_loop", "muon"])
def test_own_loops_in_windows(name: str) -> None:
    options = "--policy", "cadence", "--speeds", "1,0.5", "--ms-per-sample", "0.2"
    done = ended(*ELCHE, *options, f"{EXAMPLES}/{name}.py")
    assert done.returncode == 0, done.stderr
    shown = [float(text) for text in re.findall(r"([\d.]+)% of held-out", done.stdout)]
    assert len(shown) == 5
    assert shown[-1] > 80


def test_an_own_loop_alone() -> None:
    done = ended(f"{EXAMPLES}/own_loop.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out digits right") == 5


def test_trainer() -> None:
    done = ended(*ELCHE, "--nproc", "2", f"{EXAMPLES}/trainer.py")
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow  # tests/comm/gradients/test_weights.py has means over tokens
def test_tokens() -> None:
    script = f"{EXAMPLES}/tokens.py"
    done = ended(*ELCHE, "--speeds", "1,0.5", "--ms-per-sample", "0.2", script)
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert ended(script).stdout == done.stdout


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["gan", "nanogpt", "policy_gradient"])
def test_by_share(name: str) -> None:
    """The slow rank's part becomes the smaller one; the parts make up the batch."""
    done = ended(*ELCHE, "--speeds", "1,0.25", f"{EXAMPLES}/by_share/{name}.py")
    assert done.returncode == 0, done.stderr
    line = r"step (\d+) rank (\d): (\d+) \w+, \w+ ([\d.]+)"
    lines = sorted(
        (int(a), b, int(c), d) for a, b, c, d in re.findall(line, done.stdout)
    )
    (*_, fast, figure), (*_, slow, _) = lines[:2]
    (*_, faster, last), (*_, slower, _) = lines[-2:]
    assert fast == slow == (faster + slower) / 2
    assert faster > slower
    # The loss falls; the ring's spread is 1.41, the best return 1.
    assert abs(float(last) - float(figure)) > (1.0 if name == "nanogpt" else 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_stopped_run_goes_on(tmp_path: Path, is_shared: bool) -> None:
    """Inside an epoch; alone as if it had not been stopped."""
    launcher = (*ELCHE, "--speeds", "1,0.5")  # steps of 20 ms or more
    command = (*(launcher if is_shared else ()), f"{EXAMPLES}/resume.py")
    halves = [
        ended(*command, "--folder", str(tmp_path), *stop)
        for stop in (("--stop-after", "55"), ())
    ]
    assert [half.returncode for half in halves] == [1, 0], halves[-1].stderr
    told = halves[0].stdout + halves[1].stdout
    assert re.findall(r"epoch (\d):", told) == list("01234")
    if not is_shared:
        through = ended(*command, "--folder", str(tmp_path / "through"))
        assert told == through.stdout
