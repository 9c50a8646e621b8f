"""A reduction past its deadline names the ranks that did not arrive."""

from __future__ import annotations

import re
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

import elche
from elche.comm.transport.process_group import Group
from elche.errors import DeadlineError, ElcheError
from elche.runtime.process import worker
from elche.session.process import current_run
from tests.distributed.cases.tasks import Task, begin, take_step
from tests.distributed.patience import all_here, lose_patience
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

LATE = 1


def _is_late(folder: str, group: Group) -> bool:
    """All have come so far; from here on nobody waits for long."""
    all_here(folder)
    lose_patience(group, 1.0)
    worker.ABORT_WAIT_S = 0.5  # the coordinator's own deadline is far away
    if this_place().rank == LATE:
        all_here(folder, "told")
    return this_place().rank == LATE


def _in_a_loop(folder: str) -> str:
    """Rank 1 is in the loop's body while the others reduce."""
    options: dict[str, Any] = {"policy": "sync", "transport": "gloo"}
    model, optimizer, loader = begin(Task(), **options)
    run = current_run()
    assert run is not None
    for number, (x, y, *_) in enumerate(loader):
        if number == 2 and _is_late(folder, run.worker.group):
            return "late"
        take_step(model, optimizer, x, y)
    return "reduced"


def _said(folder: str) -> str:
    waits_s = worker.ABORT_WAIT_S
    try:
        said = _in_a_loop(folder)
    except ElcheError as error:
        said = f"{type(error).__name__}: {error}"
        all_here(folder, "told")
    finally:
        worker.ABORT_WAIT_S = waits_s
        elche.shutdown()
    return said


def test_who_did_not_arrive_is_named(ranks3: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, late, third = ranks3.serve(_said, folder)
    assert late == "late"
    for said in (first, third):
        assert said.startswith("DeadlineError: ")
        assert re.search(r"ranks that did not arrive: [02, ]*1\b", said), said
    # Whoever notices last has seen that the other one has, too.
    assert any(said.endswith("did not arrive: 1") for said in (first, third))


def test_the_coordinators_word_that_time_is_up_is_completed() -> None:
    """It knows who has not reported; who has not come is seen in the memory."""

    def check() -> None:
        raise DeadlineError("no message arrived for 300 s")

    group = Group(None, 0, 2, 100.0)
    group.check = check
    says = "300 s; gradients; ranks that did not arrive: 1"
    with pytest.raises(DeadlineError, match=says):
        group.wait_until(lambda: False, "gradients", lambda: [1])


def test_an_error_that_a_work_has_explained_is_not_explained_again() -> None:
    """It is a RuntimeError as torch's are, of which the coordinator is asked."""

    def wait() -> None:
        raise DeadlineError("rank 1 did not come")

    group = Group(None, 0, 2, 100.0)
    with pytest.raises(DeadlineError, match=r"^rank 1 did not come$"):
        group.wait(SimpleNamespace(wait=wait), "gradients")


def test_who_comes_at_the_moment_of_the_deadline_has_come() -> None:
    group = Group(None, 0, 2, 0.0)
    looks = iter([False, True])
    group.wait_until(lambda: next(looks), "gradients", list)
    assert next(looks, None) is None
