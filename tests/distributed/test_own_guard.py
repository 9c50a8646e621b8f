"""The user's guard in real runs: asked, obeyed, and named where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elche.runtime.coordinator import serve_in_thread
from elche.runtime.guard_thread import GuardThread
from tests.distributed.cases import Task, identical, shared
from tests.harness import guards
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed
ENDS_WITHIN_S = 240.0


def _task(guard: object) -> Task:
    options = {"policy": "cadence", "anchor": 8, "max_anchor": 8, "guard": guard}
    return Task(samples=320, batch_size=8, options=options)


def test_the_coordinator_asks_the_users_guard_and_obeys(ranks2: RankPool) -> None:
    """The coordinator runs in this process, where the guard notes what it is asked."""
    guards.Shortest.asked.clear()
    traces = ranks2.run(shared, _task(guards.Shortest), case_setup=serve_in_thread)
    assert identical([trace.state for trace in traces])
    assert traces[0].anchors[-1] == 1
    assert len(guards.Shortest.asked) >= 2
    assert {len(seen) for seen in guards.Shortest.asked} == {2}
    asked = len(guards.Shortest.asked)
    traces = ranks2.run(shared, _task(False), case_setup=serve_in_thread)
    assert traces[0].anchors == [8, 8]
    assert len(guards.Shortest.asked) == asked


@pytest.mark.parametrize(
    ("guard", "says"),
    [
        ("no_such_module:Mine", "guard 'no_such_module:Mine' cannot be imported"),
        (guards.Demanding, "Demanding' cannot be made: TypeError"),
        (guards.Raising, "raised in observe(): ZeroDivisionError: no spread"),
        (guards.Mute, "to return an elche.Verdict from observe(), got None"),
    ],
)
def test_a_guard_that_fails_ends_the_run_on_every_rank(
    ranks2: RankPool, guard: object, says: str
) -> None:
    outcomes = ranks2.run(
        shared, _task(guard), case_setup=serve_in_thread, expect_failure=True
    )
    for outcome in outcomes:
        assert says in str(outcome.error)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The coordinator, in this process, waits a moment once the guard is made."""
    ask = GuardThread.ask
    made: list[object] = []

    def soon(
        thread: GuardThread, question: Callable[[], object], within_s: float
    ) -> object:
        if not made:
            made.append(ask(thread, question, within_s))
            return made[0]
        return ask(thread, question, 0.01)

    guards.Hanging.release.clear()
    monkeypatch.setattr(GuardThread, "ask", soon)
    yield
    guards.Hanging.release.set()


@pytest.mark.usefixtures("impatient")
def test_a_guard_that_hangs_is_named_on_every_rank(ranks2: RankPool) -> None:
    outcomes = ranks2.run(
        shared,
        _task(guards.Hanging),
        case_setup=serve_in_thread,
        expect_failure=True,
    )
    for outcome in outcomes:
        said = str(outcome.error)
        assert "guard 'tests.harness.guards:Hanging' hangs in observe()" in said
        assert "no answer came within 0.01 s" in said


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elche
from my_guard import Mine

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=4)
model, optimizer, loader = elche.setup(
    model, optimizer, loader, policy="cadence", anchor=8, max_anchor=8, guard=Mine
)
for _ in range(2):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_guard_beside_the_script_is_found_and_the_story_tells(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "my_guard.py").write_text(
        "import elche\n"
        "class Mine(elche.Guard):\n"
        "    def observe(self, divergences, window_batches):\n"
        "        print('asked', len(divergences))\n"
        "        return elche.Verdict(hold=True, nudge=0.1, reason='short')\n"
        "    def state_dict(self):\n"
        "        return {}\n"
        "    def load_state_dict(self, state):\n"
        "        pass\n"
    )
    story = tmp_path / "story.txt"
    own = {k: v for k, v in os.environ.items() if not k.startswith("ELCHE_")}
    command = [sys.executable, "-m", "elche.cli", "run", "--nproc", "2"]
    ended = subprocess.run(
        [*command, "--story", str(story), str(folder / "train.py")],
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        env={**own, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "asked 2" in ended.stdout
    assert "!! anchor 8 -> 1: short" in story.read_text()
