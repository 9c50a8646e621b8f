"""Averages of the model's weights that a loop keeps: equal on all ranks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elche.comm.transport.process_group import Group
from elche.config import RunConfig
from elche.errors import ConfigError
from elche.runtime.rank_settings import check_shared
from elche.runtime.watch.model_copies import CopiesMade, ModelCopies, check_copies
from tests.distributed.cases.tasks import Task, build, identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.runtime.watch.cases.copies_cases import (
    DECAY,
    Commit,
    keep_copies,
)

SAMPLES, BATCH, EPOCHS = 100, 8, 2
STEPS = EPOCHS * 13
"""That a single process takes: the last batch of an epoch has four samples."""

WINDOWS: dict[str, Any] = {"deterministic": True, "max_anchor": 2}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "async"},
        {"policy": "cadence"},
        {"policy": "cadence", "update": "gradients"},
    ],
    ids=["async", "cadence", "gradients"],
)
def test_copies_follow_the_run(ranks2: RankPool, options: dict[str, Any]) -> None:
    """The EMA is the one of the common models; rank 1 begins to update it later."""
    task = Task(
        samples=SAMPLES,
        batch_size=BATCH,
        epochs=EPOCHS,
        dtype="float64",
        model="norm",
        options=WINDOWS | options,
    )
    first, second = ranks2.run(keep_copies, task, case_setup=serve_in_thread)
    for name in ("ema", "swa", "by_hand", "model"):
        assert identical([getattr(first, name), getattr(second, name)]), name
    for mine, others in zip(first.commits, second.commits, strict=True):
        assert mine[0] == others[0]
        assert all(map(torch.equal, mine[1], others[1]))

    called = sum(samples[0] for samples, _ in first.commits if samples)
    assert 0 < EPOCHS * SAMPLES - called <= 3 * BATCH  # rank 1 did not at first
    assert first.ema["n_averaged"] == called * STEPS // (EPOCHS * SAMPLES)
    assert STEPS // 2 - 4 <= first.swa["n_averaged"] <= STEPS // 2
    expected, parameters = _ema(first.commits), [n for n in first.ema if "." in n]
    names = [n for n in parameters if "running" not in n and "num_batches" not in n]
    for name, value in zip(names, expected, strict=True):
        torch.testing.assert_close(first.ema[name], value, rtol=1e-12, atol=1e-12)
    for name in first.by_hand:
        kind, mean = first.own[name].dtype, (first.own[name] + second.own[name]) / 2
        mean = mean if kind.is_floating_point else mean.round()
        torch.testing.assert_close(first.by_hand[name], mean.to(kind))


@pytest.mark.parametrize("kind", ["module", "dict", "list", "handed over", "frozen"])
def test_a_copy_that_is_written_by_hand_is_named(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However it is kept, once; not one that is handed over, or only read."""
    model = nn.Linear(3, 2)
    other, plain = (
        copy.deepcopy(model),
        [p.detach().clone() for p in model.parameters()],
    )
    named = dict(zip(("weight", "bias"), plain, strict=True))
    held = {"dict": named, "list": plain}.get(kind, other)
    copies = ModelCopies(model, [other] if kind == "handed over" else [])
    copies.begin_epoch(8, 64)
    for each in [*other.parameters()] if held is other else plain:
        if kind != "frozen":
            each.detach().mul_(2.0)
    for _ in range(2):
        copies.end_epoch(Group.alone(1.0), has_trained=True)
    said = [line for line in caplog.messages if "elche does not know" in line]
    assert len(said) == (kind not in ("handed over", "frozen"))


def _ema(commits: list[Commit]) -> list[torch.Tensor]:
    """e <- d^k e + (1 - d^k) θ after k global batches; the first update copies."""
    ema: list[torch.Tensor] = []
    total = made = 0
    for samples, common in commits:
        total += samples[0] if samples else 0
        count = total * STEPS // (EPOCHS * SAMPLES) - made
        made += count
        if count and not ema:
            ema = common
        kept = DECAY**count
        ema = [kept * e + (1.0 - kept) * c for e, c in zip(ema, common, strict=False)]
    return ema


@pytest.mark.distributed
def test_under_sync_nothing_is_touched(ranks2: RankPool) -> None:
    """Every rank updates after each global batch, but rank 1 not after the first."""
    task = Task(samples=48, batch_size=8, epochs=1, options={"policy": "sync"})
    found = ranks2.run(keep_copies, task, case_setup=serve_in_thread)
    assert [kept.is_patched for kept in found] == [False, False]
    assert [int(kept.ema["n_averaged"]) for kept in found] == [6, 3]
    assert identical([kept.by_hand for kept in found])


@pytest.mark.parametrize(
    ("is_known", "calls", "trains", "warns"),
    [
        (True, True, True, False),
        (True, False, True, True),
        (True, False, False, False),
        (False, False, False, True),
    ],
    ids=["as others", "on rank 0 alone", "left out", "left out, not handed over"],
)
def test_a_copy_that_only_other_ranks_update_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
    is_known: bool,
    calls: bool,
    trains: bool,
    warns: bool,
) -> None:
    model = nn.Linear(2, 2)
    ema = AveragedModel(model)
    copies, group = ModelCopies(model, [ema] * is_known), Group.alone(1.0)
    copies.attach()
    try:
        for _ in range(2):
            copies.begin_epoch(8, 64)
            copies.begin_batch(8)
            if calls:
                ema.update_parameters(model)
            copies.begin_batch(0)
            copies.committed((8,), dict)
            copies.end_epoch(group, has_trained=trains)
    finally:
        copies.detach()
    assert int(ema.n_averaged) == 2 * is_known
    assert len(caplog.messages) == warns
    assert all("call it on every rank" in each for each in caplog.messages)


def test_updates_of_other_models_or_between_windows_are_made_at_once() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    copies = ModelCopies(model, [])
    copies.attach()
    copies.begin_batch(4)
    try:
        mine, foreign = AveragedModel(model), AveragedModel(other)
        mine.update_parameters(model)
        foreign.update_parameters(other)
        copies.begin_batch(0)
        later = AveragedModel(model)
        later.update_parameters(model)
    finally:
        copies.detach()
    assert [int(each.n_averaged) for each in (mine, foreign, later)] == [0, 1, 1]
    assert copies.closed(is_finite=True) == (4,)


class Lazy(OrderedDict[Any, Any]):
    """As transformers' mappings of classes: its get is not a dict's."""

    def get(self, key: Any, default: Any) -> Any:  # type: ignore[override]
        raise TypeError(key)


def test_objects_that_are_no_copies_are_passed_over() -> None:
    model = nn.Linear(3, 2)
    with torch.device("meta"):
        held: list[Any] = [nn.Linear(3, 2)]
    held += [nn.Linear.__new__(nn.Linear), Lazy(weight=1, bias=2)]
    held += [[torch.zeros(2, 3).to_sparse(), torch.zeros(2)], [1, 2]]
    copied = copy.deepcopy(model)
    made = CopiesMade(model, [])
    assert not made.take_written()
    copied.weight.detach().mul_(2.0)
    assert made.take_written()
    assert not made.take_written()  # said once


@pytest.mark.parametrize(
    ("copied", "fault"),
    [
        (lambda model: "ema", r"expected copies= to hold modules, got 'ema'"),
        (lambda model: nn.Sequential(model), r"a Sequential that shares parameters"),
        (lambda model: AveragedModel(model[0]), r"an AveragedModel of another module"),
    ],
)
def test_what_is_no_copy(copied: Any, fault: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=fault):
        check_copies([copied(model)], model)


def test_optimizers_that_cannot_follow_a_policy_are_refused() -> None:
    """A share of one sample reaches a loss of 0 before others: LBFGS runs on there."""
    model, _, loader = build(Task())
    lookahead = type("Lookahead", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    compares = torch.optim.LBFGS(model.parameters())
    does_not = torch.optim.LBFGS(model.parameters(), tolerance_change=0.0)
    for optimizer, policies, says in (
        (lookahead, ("async", "auto"), "Lookahead resets parameters to"),
        (compares, ("sync", "auto"), "LBFGS evaluates its closure as often"),
        (does_not, (), ""),
    ):
        for policy in ("sync", "async", "auto"):
            is_refused = policy in policies
            with (
                pytest.raises(ConfigError, match=says) if is_refused else nullcontext()
            ):
                config = RunConfig(policy=policy)  # type: ignore[arg-type]
                check_shared(model, [optimizer], loader, config)
