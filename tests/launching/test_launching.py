"""`elche.launch`: what comes back of a function that every rank runs."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
import torch

import elche
from elche.launching import function_rank, launching
from elche.monitor.run_history import RunHistory
from elche.runtime.report.event_file import NAME, EventFile
from tests.harness import printing
from tests.runtime.process.cases.functions import (
    fails_on_rank_1,
    outlives_rank_0,
    trained,
    waits,
)

pytestmark = pytest.mark.distributed

SCRIPT = str(Path(__file__).parents[1] / "runtime/process/cases/functions.py")


@pytest.fixture(scope="module")
def imports() -> None:
    """Imports here, once, what each fork would import."""
    parameter = torch.nn.Parameter(torch.ones(1))
    elche.setup.__name__, torch.optim.SGD([parameter], lr=0.1).zero_grad()


@pytest.fixture
def forks(imports: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, whose own functions cannot be imported."""
    monkeypatch.setattr(launching, "_has_no_file", lambda main: True)


@pytest.mark.slow  # a fork of a process that ran other tests; notebooks: integrations
@pytest.mark.usefixtures("forks")
def test_forks_return_what_rank_0_returns(capsys: pytest.CaptureFixture[str]) -> None:
    """The same parameters as of one device, in functions that cannot be pickled."""
    alone = elche.launch(lambda: trained(0.1))
    together = elche.launch(lambda: trained(0.1), speeds=[1.0, 0.5])
    assert (alone[0], together[0]) == (1, 2)
    torch.testing.assert_close(together[1], alone[1], rtol=1e-5, atol=1e-6)
    output = capsys.readouterr().out
    assert re.findall(r"rank (\d) has trained", output)[0] == "0"
    assert sorted(re.findall(r"rank (\d) has trained", output)[1:]) == ["0", "1"]


@pytest.mark.slow  # a fork of a process that ran other tests; notebooks: integrations
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raise", "rank 1 failed: KeyError: 'no such thing'"),
        ("kill", "rank 1 failed: its process ended with code 137"),
        ("exit", "rank 1 failed: SystemExit: 3"),
    ],
)
def test_the_rank_that_failed_first_is_named(how: str, error: str) -> None:
    with pytest.raises(elche.errors.RemoteRankError, match=error) as caught:
        elche.launch(fails_on_rank_1, 2, args=(how,))
    assert caught.value.failed_rank == 1
    has_traceback = "fails_on_rank_1" in caught.value.remote_traceback
    assert has_traceback == (how == "raise")


def test_fresh_processes_of_a_script() -> None:
    done = printing.ended(SCRIPT, "train")
    assert "returned (2, [" in done.stdout, done.stderr
    assert done.stdout.count("has trained") == 2


def test_one_rank_has_events_and_the_parameters_of_one_device(tmp_path: Path) -> None:
    history = RunHistory()
    assert elche.launch(trained, 1, args=[0.1], events=tmp_path) == trained(0.1)
    history.feed((tmp_path / NAME).read_text())
    assert history.windows[-1]["samples"] == 32
    assert [event["name"] for event in history.events] == ["left"]
    assert history.end is not None


@pytest.mark.slow
def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    with printing.started(tmp_path, [sys.executable, SCRIPT, "wait"]) as [run]:
        run.wait_for("waiting", 2)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == -signal.SIGINT
        assert run.output.rstrip().endswith("KeyboardInterrupt"), run.output


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(elche.ConfigError, match="cannot be sent to another process"):
        elche.launch(lambda: 0, 2)
    with pytest.raises(elche.ConfigError, match="devices or speeds, got both"):
        elche.launch(waits, 2, speeds=[1.0, 0.5])
    with pytest.raises(elche.ConfigError, match=r"devices or speeds, got \[\]"):
        elche.launch(waits, [])
    with pytest.raises(elche.ConfigError, match="devices or speeds, got 'cpu'"):
        elche.launch(waits, "cpu")
    with pytest.raises(elche.ConfigError, match="device 'cuda:99' does not exist"):
        elche.launch(waits, ["cuda:99"])
    trained_before = EventFile(tmp_path)
    trained_before.add({"kind": "end", "exit_codes": [0], "reason": ""})
    trained_before.close()
    with pytest.raises(elche.ConfigError, match="expected a folder without events"):
        elche.launch(waits, 2, events=tmp_path)
    with pytest.raises(elche.ConfigError, match="expected main to be a function"):
        elche.launch(3)  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(elche.ConfigError, match="a rank of a run already"):
        elche.launch(waits, 2)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(
        launching.multiprocessing.current_process(), "_name", "elche-rank-0"
    )
    with pytest.raises(elche.ConfigError, match='if __name__ == "__main__"'):
        elche.launch(waits, 2)


def test_an_accelerator_in_a_fork_of_a_notebook_that_used_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(function_rank.choice, "start", init)
    monkeypatch.setattr(function_rank.choice, "kind", lambda: "cuda")
    with pytest.raises(elche.ConfigError, match="cuda was used in this notebook"):
        function_rank.call_in_fork(print)


@pytest.mark.slow
def test_where_rank_0_has_died_the_next_one_returns() -> None:
    assert elche.launch(outlives_rank_0, 3) == (0, 2, 128.0)
