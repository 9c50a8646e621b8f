"""Whole runs as a user starts them: exits, codes, messages, nobody left hanging."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from elche.cli.main import main

pytestmark = pytest.mark.distributed

SCRIPT = str(Path(__file__).parent / "cases" / "scripts.py")
ELCHE = [sys.executable, "-m", "elche"]
ENDS_WITHIN_S = 240.0


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("ELCHE_")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        own.pop(name, None)
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        env={**own, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("case", "policy", "code", "says"),
    [
        ("raise", "sync", 1, "ValueError: a fault in user code"),
        ("exit", "cadence", 7, r"rank 1 called sys.exit\(7\) inside the loop"),
    ],
)
def test_failures_end_every_rank_with_a_reason(
    case: str, policy: str, code: int, says: str
) -> None:
    """That a killed rank does not end a run is in test_outlived."""
    ended = _run(*ELCHE, "run", "--nproc", "2", SCRIPT, case, policy)
    assert ended.returncode == code
    assert re.search(says, ended.stderr), ended.stderr
    assert "done" not in ended.stdout
    assert "elche run: ranks [0, 1] ended with codes" in ended.stderr
    if case == "raise":  # the others show where it was
        assert "--- traceback of rank 1 ---" in ended.stderr
        assert ended.stderr.count("in _fail") == 2


@pytest.mark.parametrize(
    "policy", ["sync", pytest.param("cadence", marks=pytest.mark.slow)]
)
def test_sys_exit_in_the_loop_of_one_rank_ends_all_as_it_says(policy: str) -> None:
    # Once: under windows it passed for a break, and the other rank went on after it.
    ended = _run(*ELCHE, "run", "--nproc", "2", SCRIPT, "exit 0", policy)
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 called sys.exit(0) inside the loop" in ended.stderr
    assert "done" not in ended.stdout


@pytest.mark.parametrize(
    ("policy", "case"), [("", "half-way"), ("sync", "half-way, raise")]
)
def test_an_iterator_left_half_way_is_silent_at_exit(policy: str, case: str) -> None:
    command = [*ELCHE, "run", "--nproc", "2"] if policy else [sys.executable]
    ended = _run(*command, SCRIPT, case, policy or "sync")
    assert ended.returncode == int(case != "half-way")
    assert ("ValueError: a fault in user code" in ended.stderr) == ended.returncode
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize(
    "policy", ["sync", pytest.param("cadence", marks=pytest.mark.slow)]
)
def test_torchrun(policy: str) -> None:
    ended = _run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        SCRIPT,
        "key",
        policy,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
    # Once: torchrun's store, which is open to all, held the run's key.
    paths = re.findall(r"rank \d found (/\S+) of mode 600", ended.stdout)
    assert len(paths) == 2
    assert not any(map(os.path.exists, paths))


def test_plain_python_is_one_rank() -> None:
    ended = _run(sys.executable, SCRIPT, "ok")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "done 0 of 1\n"
    assert ended.stderr.startswith("elche: CPU")


def test_speeds_are_named_and_labelled_emulated() -> None:
    ended = _run(
        *ELCHE, "run", "--speeds", "1,0.25", "--ms-per-sample", "0.1", SCRIPT, "ok"
    )
    assert ended.returncode == 0, ended.stderr
    assert "terminate called" not in ended.stderr
    assert ended.stdout.count("done") == 2
    assert (
        "elche: 2 devices, unequal: 1 x CPU emulated at speed 1, 1 x CPU emulated at "
        "speed 0.25; policy sync" in ended.stderr
    )
    says = r"elche: last epoch: [\d.]+ times the fastest device's own speed; shares "
    assert re.search(says + r"\d+ %, \d+ %; policy sync", ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--speeds", "1,-1"], "expected positive numbers, got '1,-1'"),
        (["--speeds", "1,x"], "expected numbers like 1,0.25, got '1,x'"),
        (["--devices", "cuda:99"], "device 'cuda:99' does not exist"),
        (["--devices", "abacus"], "unknown device 'abacus'"),
        (["--devices", "cpu, abacus"], "unknown device 'abacus'"),
        (["--devices", ""], "expected names with commas between, got ''"),
        (["--devices", "cpu,"], "expected names with commas between, got 'cpu,'"),
        (["--nproc", "0"], "expected --nproc of at least 1, got 0"),
        (["--nproc", "2", "--speeds", "1,1"], "expected one of --nproc"),
        (["--ms-per-sample", "2"], "give their --speeds"),
        (["--speeds", "1,1", "--ms-per-sample", "0"], "positive --ms-per-sample"),
        (["--policy", "nonsense"], "'nonsense' is not one of"),
        (["--nprocs", "2"], "No such option"),
    ],
)
def test_bad_options(arguments: list[str], says: str) -> None:
    """In this process: nothing is started."""
    result = CliRunner().invoke(main, ["run", *arguments, SCRIPT, "ok"])
    assert result.exit_code == 2, result.output
    assert says in result.output
