"""A run that is saved between epochs and goes on in other processes' place."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elche
from elche.errors import ElcheError
from elche.session.process import failing_together
from tests.distributed.cases.tasks import Task, build, identical
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

TASK = Task(
    samples=96,
    batch_size=8,
    options={
        "policy": "cadence",
        "deterministic": True,
        "speed_hints": (1.0, 0.5),
        "codec": "int8",
        "outer": "nesterov",
    },
)
POLICIES: dict[str, dict[str, Any]] = {
    "cadence": {},
    "async": {"policy": "async"},
    "slowmo": {"policy": "async", "outer": "slowmo"},
}


def _train(
    task: Task, epochs: int, saved: Sequence[bytes] | None, forgets: bool
) -> tuple[dict[str, torch.Tensor], float, bytes]:
    """Epochs on this rank, from what it saved before: model, progress, and all of it.

    Args:
        task: what to train.
        epochs: how many.
        saved: of each rank.
        forgets: leaves out what averaging held.
    """
    model, optimizer, loader = build(task)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, **nested(task.options)
    )
    if saved is not None:
        file = io.BytesIO(saved[this_place().rank])
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.generator.set_state(state["order"])
        elche.load_state_dict(
            {**state["run"], "averaging": None} if forgets else state["run"]
        )
    for _ in range(epochs):
        for x, y, _, _ in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    progress, file = elche.progress_samples(), io.BytesIO()
    states = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "order": loader.generator.get_state(),
        "run": elche.state_dict(),
    }
    torch.save(states, file)
    kept = {name: value.detach().clone() for name, value in states["model"].items()}
    elche.shutdown()
    return kept, progress, file.getvalue()


@pytest.mark.parametrize("name", POLICIES)
def test_a_saved_run_goes_on_to_the_same_bits(ranks2: RankPool, name: str) -> None:
    task = dataclasses.replace(TASK, options={**TASK.options, **POLICIES[name]})

    def run(epochs: int, saved: Any = None, *, forgets: bool = False) -> list[Any]:
        return ranks2.run(
            _train, task, epochs, saved, forgets, case_setup=serve_in_thread
        )

    through = run(3)
    saved = [each[2] for each in run(2)]
    went_on = run(1, saved)
    assert identical([state for state, *_ in (*through, *went_on)])
    assert [progress for _, progress, _ in (*through, *went_on)] == [3 * 96] * 4
    without = run(1, saved, forgets=True)
    assert not identical([without[0][0], through[0][0]])


def _after_a_break() -> int:
    """Rank 0 leaves an epoch early and loads a state; its samples of the run."""
    options = {**nested(TASK.options), "timeout_s": 20.0}
    model, optimizer, loader = elche.setup(*build(TASK), **options)
    for x, y, _, _ in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if elche.rank() == 0:
            break
    state = elche.state_dict()
    elche.load_state_dict(state)
    elche.shutdown()
    return int(state["samples"])


def test_a_state_is_loaded_after_some_ranks_left_an_epoch_early(
    ranks2: RankPool,
) -> None:
    """The others learn that it has ended when those that left it are heard of."""
    found = ranks2.run(_after_a_break, case_setup=serve_in_thread)
    assert found[0] == found[1] > 0


WRONG = {"version": 7, "samples": -1, "steps": float("nan")}


def _misuse(case: str) -> str:
    """What is said of a state that is asked for, or given, where it cannot be."""
    options = dict(TASK.options)
    if case == "gradients":
        options = {"policy": "sync"}
    model, optimizer, loader = build(TASK)
    if case != "no run":
        model, optimizer, loader = elche.setup(
            model, optimizer, loader, **nested(options)
        )
    try:
        with failing_together():
            if case == "no run":
                elche.state_dict()
            if case == "gradients":
                assert elche.state_dict()["averaging"] is None
                elche.load_state_dict(
                    {"version": 2, "samples": 0, "steps": 0.0, "averaging": {}}
                )
            state = elche.state_dict()
            if case in WRONG:
                elche.load_state_dict({**state, case: WRONG[case]})
            if case == "entries":
                elche.load_state_dict({"model": state})
            if case == "codec":
                state["averaging"]["groups"][0]["dtype"] = "float16"
                elche.load_state_dict(state)
            for _ in loader:
                elche.state_dict()
    except ElcheError as error:
        return str(error)
    finally:
        elche.shutdown()
    return "nothing was refused"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("no run", r"elche\.state_dict\(\) needs a run: call elche\.setup first"),
        ("gradients", "is of averaged parameters, and this run reduces gradients"),
        ("version", "expected a state of version 2, got 7"),
        ("samples", "expected samples in the state to be an int >= 0, got -1"),
        ("steps", r"expected steps in the state to be a finite number >= 0, got nan"),
        ("entries", r"expected a state with entries \[.*\], got \['model'\]"),
        ("codec", "rank 0 cannot load its state: expected 323 elements of float32"),
        ("loop", r"state_dict\(\) inside an epoch"),
    ],
)
def test_a_state_is_refused_by_what_is_wrong(
    ranks2: RankPool, case: str, says: str
) -> None:
    for text in ranks2.run(_misuse, case, case_setup=serve_in_thread):
        assert re.search(says, text), text
