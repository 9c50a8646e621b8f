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


LOSS, RIGHT = r"loss ([\d.]+)", r"([\d.]+)% of held-out digits right"
UNEQUAL = "--speeds", "1,0.5", "--ms-per-sample", "0.2"
WINDOWS = "--policy", "cadence", *UNEQUAL


@pytest.mark.parametrize(
    ("name", "options", "pattern", "count"),
    [
        ("own_loop", (), RIGHT, 5),
        ("trainer", ("--nproc", "2"), LOSS, 5),
        pytest.param("own_loop", WINDOWS, RIGHT, 5, marks=SLOW),
        pytest.param("muon", WINDOWS, RIGHT, 5, marks=SLOW),
        # tests/comm/gradients/test_weights.py has means over tokens
        pytest.param("tokens", UNEQUAL, LOSS, 3, marks=SLOW),
    ],
)
def test_figures_get_better(
    name: str, options: tuple[str, ...], pattern: str, count: int
) -> None:
    script = f"{EXAMPLES}/{name}.py"
    done = ended(*((*ELCHE, *options) if options else ()), script)
    assert done.returncode == 0, done.stderr
    shown = [float(text) for text in re.findall(pattern, done.stdout)]
    assert len(shown) == count
    assert shown[-1] < shown[0] if pattern == LOSS else shown[-1] > 80
    assert name != "tokens" or ended(script).stdout == done.stdout


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
