"""A run that has ended, however it did, leaves model and optimizer as they were."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

import elche
from elche.errors import CommunicationError, ConfigError, ElcheError
from elche.runtime.epochs import epoch_execution
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.runtime.sync.sync_epoch import SyncEpoch
from elche.session.process import current_run
from tests.distributed.cases.tasks import Task, build
from tests.harness.rank_pool import RankPool
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

RUNS: tuple[dict[str, Any], ...] = (
    {"policy": "sync"},
    {"policy": "sync", "loss_reduction": "sum"},
    {"policy": "cadence"},
    {"policy": "cadence", "update": "gradients"},
    {"policy": "async"},
)


def _hooks(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """What somebody may have hung onto a model, its optimizer, or all optimizers."""
    return {
        "optimizer": dict(vars(optimizer)),
        "after steps": len(optimizer._optimizer_step_post_hooks),
        "before steps": len(optimizer._optimizer_step_pre_hooks),
        "of all": len(_global_optimizer_pre_hooks),
        "gradients": [
            len(getattr(p, "_post_accumulate_grad_hooks") or ())  # noqa: B009
            for p in model.parameters()
        ],
    }


def _after(
    options: dict[str, Any], end: str
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """What hangs there before and after runs that end so, and whether they broke."""
    model, optimizer, loader = build(Task(samples=64, batch_size=8))
    before = _hooks(model, optimizer)
    ways = {"well": _leave, "in setup": _fail_in_setup, "broken": _break_down}
    broke = False
    for _ in range(1 if end == "broken" else 2):
        broke |= ways[end](model, optimizer, loader, options)
    return before, _hooks(model, optimizer), broke


def _leave(model: Any, optimizer: Any, loader: Any, options: Any) -> bool:
    """Inside an epoch."""
    *_, shared = elche.setup(model, optimizer, loader, **nested(options))
    batches = iter(shared)
    first = next(batches, None)
    if first is not None:  # another rank may have left before
        F.cross_entropy(model(first[0]), first[1]).backward()
    elche.shutdown()
    return False


def _fail_in_setup(model: Any, optimizer: Any, loader: Any, options: Any) -> bool:
    def refuse(*_: Any) -> None:
        raise ConfigError("no such loader")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(epoch_execution, "LeasedBatches", refuse)
        with pytest.raises(ElcheError, match="no such loader"):
            elche.setup(model, optimizer, loader, **nested(options))
    elche.shutdown()
    return False


def _break_down(model: Any, optimizer: Any, loader: Any, options: Any) -> bool:
    """The end of the epoch cannot be told to anybody; another rank may be first."""
    broke = False

    def lose(epoch: Any, *_: Any) -> None:
        raise ZeroDivisionError("nobody is there")

    *_, shared = elche.setup(model, optimizer, loader, **nested(options))
    run = current_run()
    assert run is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SyncEpoch, "_leave", lose)
        patched.setattr(WindowEpoch, "_leave", lose)
        batches = iter(shared)
        with contextlib.suppress(ElcheError):
            next(batches, None)
        try:
            elche.shutdown()
        except ZeroDivisionError:
            broke = True
        except ElcheError:  # the other rank broke down before
            pass
    with pytest.raises(CommunicationError, match="the run has ended on this rank"):
        _ = run.worker.group
    return broke


@pytest.mark.parametrize("options", RUNS, ids=str)
@pytest.mark.parametrize("end", ["well", "broken"])
@pytest.mark.every(3)
def test_nothing_is_left_behind(
    ranks2: RankPool, options: dict[str, Any], end: str
) -> None:
    found = ranks2.serve(_after, options, end)
    for before, after, _ in found:
        assert after == before
    assert any(broke for *_, broke in found) == (end == "broken")


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_nothing_is_left_behind_by_a_setup_that_fails(
    ranks2: RankPool, options: dict[str, Any]
) -> None:
    for before, after, _ in ranks2.serve(_after, options, "in setup"):
        assert after == before


def test_nothing_is_left_behind_by_a_run_of_one() -> None:
    before, after, _ = _after({}, "well")
    assert after == before
