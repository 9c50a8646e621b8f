"""The examples and the README's loop run as written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("own_loop", policy) for policy in ("sync", "cadence", "async", "auto")),
        ("muon", "cadence"),
    ],
)
def test_own_loop(name: str, policy: str) -> None:
    ended = _run(
        *(sys.executable, "-m", "elche", "run", "--policy", policy),
        *("--speeds", "1,0.5", "--ms-per-sample", "0.2", f"examples/{name}.py"),
    )
    assert ended.returncode == 0, ended.stderr
    shown = [float(text) for text in re.findall(r"([\d.]+)% of held-out", ended.stdout)]
    assert len(shown) == 5
    assert shown[-1] > 80


@pytest.mark.parametrize("name", ["own_loop", pytest.param("muon", marks=SLOW)])
def test_own_loops_alone(name: str) -> None:
    ended = _run(sys.executable, f"examples/{name}.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("held-out digits right") == 5


def test_trainer() -> None:
    ended = _run(
        *(sys.executable, "-m", "elche", "run", "--nproc", "2"),
        "examples/trainer.py",
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", ended.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow  # tests/comm/gradients/test_weights.py has means over tokens
def test_tokens() -> None:
    launcher = ("-m", "elche", "run", "--speeds", "1,0.5")
    ended = _run(
        *(sys.executable, *launcher, "--ms-per-sample", "0.2", "examples/tokens.py")
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", ended.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert _run(sys.executable, "examples/tokens.py").stdout == ended.stdout


@pytest.mark.slow
def test_gan() -> None:
    ended = _run(
        *(sys.executable, "-m", "elche", "run", "--nproc", "2"), "examples/gan.py"
    )
    assert ended.returncode == 0, ended.stderr
    spread = [float(text) for text in re.findall(r"spread ([\d.]+)", ended.stdout)]
    assert len(spread) == 4
    assert abs(spread[-1] - 1.41) < 0.3 < abs(spread[0] - 1.41)


def test_planning_the_example_pipeline() -> None:
    command = (sys.executable, "-m", "elche", "plan", "pipeline")
    ended = _run(*command, "examples/pipeline_devices.toml", "--json", "-")
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert figures["step_time_s"] <= 1.12 * figures["ideal_s"]


def test_simulating_the_example_cluster() -> None:
    command = (sys.executable, "-m", "elche", "simulate", "examples/cluster.toml")
    ended = _run(*command, "--json", "-")
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert 0.9 < figures["efficiency"] <= 1.0
    assert figures["coordinator_us_per_event"] > 0
    assert figures["waits"]


def test_the_loop_in_the_readme(tmp_path: Path) -> None:
    """The 12 lines of the README, on a model and data made here."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    loop = next(block for block in blocks if "elche.setup" in block)
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "model = torch.nn.Linear(4, 3)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))\n"
        "loader = DataLoader(data, batch_size=8, shuffle=True)\n"
        "epochs = 2\n" + loop + "print('trained', elche.rank())\n"
    )
    ended = _run(*(sys.executable, "-m", "elche", "run", "--nproc", "2", str(script)))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained") == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_stopped_run_goes_on(tmp_path: Path, is_shared: bool) -> None:
    """Inside an epoch; alone as if it had not been stopped."""
    launcher = ("-m", "elche", "run", "--speeds", "1,0.5")  # steps of 20 ms or more
    command = (sys.executable, *(launcher if is_shared else ()), "examples/resume.py")
    halves = [
        _run(*command, "--folder", str(tmp_path), *stop)
        for stop in (("--stop-after", "55"), ())
    ]
    assert [half.returncode for half in halves] == [1, 0], halves[-1].stderr
    told = halves[0].stdout + halves[1].stdout
    assert re.findall(r"epoch (\d):", told) == list("01234")
    if not is_shared:
        through = _run(*command, "--folder", str(tmp_path / "through"))
        assert told == through.stdout
