"""Whole runs as a user starts them: exits, codes, messages, nobody left hanging."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from elche.cli.main import main
from tests.harness.printing import ended

pytestmark = pytest.mark.distributed

SCRIPT = str(Path(__file__).parent / "cases" / "scripts.py")
ELCHE = "-m", "elche", "run"


@pytest.mark.parametrize(
    ("case", "policy", "code", "says"),
    [
        ("raise", "sync", 1, "ValueError: a fault in user code"),
        ("exit", "cadence", 7, r"rank 1 called sys.exit\(7\) inside the loop"),
    ],
)
@pytest.mark.every(2)
def test_failures_end_every_rank_with_a_reason(
    case: str, policy: str, code: int, says: str
) -> None:
    """That a killed rank does not end a run is in test_outlived."""
    done = ended(*ELCHE, "--nproc", "2", SCRIPT, case, policy)
    assert done.returncode == code
    assert re.search(says, done.stderr), done.stderr
    assert "done" not in done.stdout
    assert "elche run: ranks [0, 1] ended with codes" in done.stderr
    if case == "raise":  # the others show where it was
        assert "--- traceback of rank 1 ---" in done.stderr
        assert done.stderr.count("in _fail") == 2


@pytest.mark.parametrize("policy", ["cadence", "sync"])
@pytest.mark.every(2)
def test_sys_exit_in_the_loop_of_one_rank_ends_all_as_it_says(policy: str) -> None:
    # Once: under windows it passed for a break, and the other rank went on after it.
    done = ended(*ELCHE, "--nproc", "2", SCRIPT, "exit 0", policy)
    assert done.returncode == 0, done.stderr
    assert "rank 1 called sys.exit(0) inside the loop" in done.stderr
    assert "done" not in done.stdout


@pytest.mark.parametrize(
    ("policy", "case"), [("", "half-way"), ("sync", "half-way, raise")]
)
def test_an_iterator_left_half_way_is_silent_at_exit(policy: str, case: str) -> None:
    command = (*ELCHE, "--nproc", "2") if policy else ()
    done = ended(*command, SCRIPT, case, policy or "sync")
    assert done.returncode == int(case != "half-way")
    assert ("ValueError: a fault in user code" in done.stderr) == done.returncode
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "policy", ["sync", pytest.param("cadence", marks=pytest.mark.slow)]
)
def test_torchrun(policy: str) -> None:
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    done = ended(*torchrun, SCRIPT, "key", policy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    # Once: torchrun's store, which is open to all, held the run's key.
    paths = re.findall(r"rank \d found (/\S+) of mode 600", done.stdout)
    assert len(paths) == 2
    assert not any(map(os.path.exists, paths))


def test_speeds_are_named_and_labelled_emulated() -> None:
    done = ended(*ELCHE, "--speeds", "1,0.25", "--ms-per-sample", "0.1", SCRIPT, "ok")
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    assert done.stdout.count("done") == 2
    assert (
        "elche: 2 devices, unequal: 1 x CPU emulated at speed 1, 1 x CPU emulated at "
        "speed 0.25; policy sync" in done.stderr
    )
    says = r"elche: last epoch: [\d.]+ times the fastest device's own speed; shares "
    assert re.search(says + r"\d+ %, \d+ %; policy sync", done.stderr), done.stderr


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
        (["--nproc", "0"], "expected --nproc to be an int >= 1, got 0"),
        (["--nproc", "2", "--speeds", "1,1"], "expected one of --nproc"),
        (["--ms-per-sample", "2"], "give their --speeds"),
        (
            ["--speeds", "1,1", "--ms-per-sample", "0"],
            "--ms-per-sample to be a positive",
        ),
        (["--policy", "nonsense"], "'nonsense' is not one of"),
        (["--nprocs", "2"], "No such option"),
    ],
)
def test_bad_options(arguments: list[str], says: str) -> None:
    """In this process: nothing is started."""
    result = CliRunner().invoke(main, ["run", *arguments, SCRIPT, "ok"])
    assert result.exit_code == 2, result.output
    assert says in result.output


def test_a_syntax_error_is_printed_once_and_starts_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = 1\nif x\n")
    result = CliRunner().invoke(main, ["run", "--nproc", "2", str(script)])
    assert result.exit_code == 1
    assert result.output.count("SyntaxError: expected ':'") == 1
    assert f'File "{script}", line 2' in result.output
    assert "ranks" not in result.output
