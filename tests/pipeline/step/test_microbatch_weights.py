"""Means over targets, and the values of a call that are cut, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elche.errors import ConfigError
from elche.pipeline.pipeline import Pipeline
from tests.harness.logged import logged
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_weight_cases import (
    IGNORED,
    SAMPLES,
    WIDTH,
    Means,
    count,
    data,
    last_loss,
    masked_mean,
    model,
    piped,
    split_calls,
    square_masks,
)


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["model's", "weighed"])
@pytest.mark.parametrize(
    ("schedule", "replicas"), [("1f1b", 1), ("zb-v", 1), ("1f1b", 2)]
)
@pytest.mark.every(5)
def test_gradients_of_padded_batches_are_those_of_one_process(
    ranks2: RankPool, way: str, schedule: str, replicas: int
) -> None:
    work = Means(way, schedule, replicas)
    for gradients, loss, warned in ranks2.run(piped, work, case_setup=serve_in_thread):
        assert gradients <= 1e-12
        assert loss <= 1e-12
        assert warned == []


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["traced", "whole", "learned", "unknown"])
def test_masks_between_positions_are_not_cut(ranks2: RankPool, how: str) -> None:
    for found in ranks2.run(square_masks, how, case_setup=serve_in_thread):
        if how == "unknown":
            assert "whole=('mask',)" in str(found.pop(0))
        assert all(isinstance(one, float) and one <= 1e-12 for one in found), found


@pytest.mark.distributed
def test_replicas_split_what_every_rank_gives(ranks2: RankPool) -> None:
    found = ranks2.run(split_calls, case_setup=serve_in_thread)
    assert "rank 1 and rank 0 were given different batches" in found[0].pop()
    for uneven, lacking in found:
        assert "the batch has 8 samples, but the target 4" in uneven
        assert "needs the batch of all replicas on every rank" in lacking
        assert "was given none on rank 1" in lacking


def by_hand(loss_fn: Any = masked_mean, **options: Any) -> Pipeline:
    made = model()
    layers = [made.embed, *made.blocks, made.head]
    return Pipeline(layers, loss_fn, micro_batches=4, **options)


def test_unequal_numbers_of_ignored_targets_are_named_once() -> None:
    tokens, labels = data(0)
    with logged("elche.pipeline") as warned:
        pipe = by_hand()
        pipe.step(tokens, labels % 3)
        assert warned == []
        labels[:] = IGNORED
        labels[:, 0] = 1
        pipe.step(tokens, labels)
        assert warned == []
        labels[0] = 1
        for _ in range(2):
            pipe.step(tokens, labels)
    assert len(warned) == 1
    assert "pass weight_of=lambda target: (target != -100).sum()" in warned[0]


def test_a_batch_without_targets_has_no_gradient() -> None:
    tokens, labels = data(0)
    pipe = by_hand(weight_of=count)
    found = pipe.step(tokens, torch.full_like(labels, IGNORED))
    assert found.loss != found.loss, "as in one process"
    assert all(not one.grad.any() for one in pipe.parameters() if one.grad is not None)


class Own(nn.Module):
    """A model that computes its own loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.criterion = nn.CrossEntropyLoss()
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return {"loss": self.loss(self, x, labels)}


def _ignoring(own: Own, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels[labels > 2] = IGNORED
    labels[:1] = IGNORED
    return F.cross_entropy(x, labels)


def _of_some(own: Own, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = x[labels > 2]
    return F.mse_loss(x, torch.zeros_like(x))


def test_labels_that_the_model_changes_in_place_are_counted_so() -> None:
    batch = {"x": torch.randn(4, WIDTH).double(), "labels": torch.tensor([0, 1, 4, 2])}
    made = Own(_ignoring).double()
    pipe = Pipeline(made, None, micro_batches=1, sample=batch)
    own = pipe.layers[0].module.own_loss
    assert own.count(batch, {}) == 2


@pytest.mark.parametrize(
    ("loss", "fault"),
    [
        (lambda own, x, y: 2 * F.cross_entropy(x, y), "one ends in aten.mul.Tensor"),
        (lambda own, x, y: own.criterion(x, y), "ends in the submodule criterion"),
        (lambda own, x, y: F.cross_entropy(x @ x.T, y), "the terms of this one"),
        (lambda own, x, y: F.mse_loss(x.mean(0), x[0] * 0), "the terms of this one"),
        (_of_some, "the terms of this one"),
        (lambda own, x, y: F.cross_entropy(x, x.argmax(-1)), "depend on call_whole"),
    ],
)
def test_a_loss_of_the_model_s_own_whose_mean_is_unknown(loss: Any, fault: str) -> None:
    batch = {"x": torch.randn(4, WIDTH), "labels": torch.arange(4)}
    with pytest.raises(ConfigError, match=rf"{fault}.*; if .* pass\s+weight_of"):
        Pipeline(Own(loss), None, micro_batches=2, sample=batch)


def test_a_loss_of_the_model_s_own_is_weighed_by_hand() -> None:
    batch = {"x": torch.randn(4, WIDTH), "labels": torch.arange(4)}
    options: dict[str, Any] = {"micro_batches": 2, "sample": batch}
    made = Own(lambda own, x, y: 2 * F.cross_entropy(x, y))
    weighed = Pipeline(made, None, weight_of=lambda one: len(one["x"]), **options)
    expected = made(**batch)["loss"].item()
    assert weighed.step(batch).loss == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, match="give the labels in the batch alone"):
        weighed.step(batch, batch["labels"])
    with pytest.raises(ConfigError, match="has a 'loss' in its output: give labels"):
        by_hand(None)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, None] + shift.sum()


def test_a_value_that_was_cut_by_its_size_alone_is_found_at_another_size() -> None:
    x, y, shift = torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES) % 3, torch.ones(8)
    made = [Shifted()]
    pipe = Pipeline(made, last_loss, micro_batches=2)
    pipe.step(x, y, shift=shift)
    with pytest.raises(ConfigError, match=r"'shift' has 8 rows for 6 samples"):
        pipe.step(x[:6], y[:6], shift=shift)
    right = Pipeline(made, last_loss, micro_batches=2, whole=("shift",))
    expected = last_loss(made[0](x, shift), y).item()
    assert right.step(x, y, shift=shift).loss == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, match=r"whole= names \['shfit'\]"):
        Pipeline(made, last_loss, micro_batches=2, whole=["shfit"]).step(
            x, y, shift=shift
        )


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x) + shift.sum()
        return x


def test_a_value_that_the_trace_never_compares_is_cut_by_no_equal_size() -> None:
    """The sample's own sizes may be equal by chance, too."""
    made, x, y = Summed(), torch.randn(6, WIDTH), torch.arange(6) % 3
    sample = {"x": x[:3], "shift": torch.ones(3)}
    batch = {"x": x, "shift": torch.ones(6)}
    options: dict[str, Any] = {"micro_batches": 2, "sample": sample}
    for given in (batch, tuple(batch.values())):
        with pytest.raises(ConfigError, match=r"first dimension of '(shift|1)'.* may"):
            Pipeline(made, F.cross_entropy, **options).step(given, y)
    pipe = Pipeline(made, F.cross_entropy, whole=("shift",), **options)
    expected = F.cross_entropy(made(**batch), y).item()
    assert pipe.step(batch, y).loss == pytest.approx(expected, rel=1e-6)
