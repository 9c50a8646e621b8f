"""Which batch a backward pass is of, by the loops that people write."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from elche.errors import ConfigError
from elche.runtime.watch.live_graph import LiveGraph

X = torch.ones(2, 3)
Late = list[tuple[Any, Any]]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def watched(model: nn.Module) -> tuple[LiveGraph, Late]:
    graphs, late = LiveGraph(model), []
    graphs.begin_epoch(lambda batch, other: late.append((batch, other)))
    return graphs, late


class Returning(nn.Module):
    """Returns something of what a network does."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.network = network()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.network(x))


@pytest.mark.parametrize(
    ("wrap", "loss_of"),
    [
        (lambda y: y, torch.sum),
        (lambda y: {"a": [None, y]}, lambda out: out["a"][1].sum()),
        (lambda y: Normal(y, 1.0), lambda out: out.log_prob(X).mean()),
        (lambda y: (y, y.mean()), lambda out: out[1] / 2),
    ],
)
def test_a_late_backward_pass_is_told_of_its_batch(
    wrap: Callable[[torch.Tensor], Any], loss_of: Callable[[Any], torch.Tensor]
) -> None:
    model = Returning(wrap)
    graphs, late = watched(model)
    graphs.begin("a")
    loss = loss_of(model(X))
    assert graphs.is_live
    for following in ("b", "c"):
        graphs.begin(following)
        loss.backward()
        assert not graphs.is_live
        loss = loss_of(model(X))
    graphs.end_epoch()
    loss.backward()
    assert late == [("a", None), ("b", None), ("c", None)]


def test_a_loop_that_fetches_normally_is_told_nothing() -> None:
    model = network()
    graphs, late = watched(model)
    for batch in range(3):
        graphs.begin(batch)
        loss = model(X).sum()
        with torch.no_grad():
            model(X)
        loss.backward(retain_graph=True)
        loss.backward()
        model(X)  # for a figure; its graph is forgotten
        assert not graphs.is_live
    assert late == []


def test_a_pass_of_several_batches_names_them() -> None:
    model = network()
    graphs, late = watched(model)
    losses = []
    for batch in range(3):
        graphs.begin(batch)
        losses.append(model(X).sum())
    torch.stack(losses).sum().backward()
    assert sorted(late) == [(0, 2), (1, 2)]


def test_a_graph_that_had_its_pass_may_be_gone_through_in_another() -> None:
    """Truncated backpropagation: what is carried over has been trained on before."""
    model = network()
    graphs, late = watched(model)
    graphs.begin(0)
    hidden = model(X)
    hidden.sum().backward(retain_graph=True)
    graphs.begin(1)
    model(hidden).sum().backward()
    assert late == []


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_computed_again_is_of_the_batch_it_was(is_whole: bool) -> None:
    inner = network()
    inner_again = Returning(lambda y: y) if is_whole else None
    model = inner_again or Returning(
        lambda y: checkpoint(inner, y, use_reentrant=False)
    )
    graphs, late = watched(model)
    graphs.begin(0)
    out = checkpoint(model, X, use_reentrant=False) if is_whole else model(X)
    graphs.begin(1)
    out.sum().backward()
    assert late == [(0, None)]
    assert not graphs.is_live


def test_a_container_is_called_by_its_parts() -> None:
    model = nn.ModuleList([network(), nn.ModuleDict({"critic": network()})])
    graphs, late = watched(model)
    graphs.begin(0)
    loss = model[1]["critic"](model[0](X).detach()).sum()  # type: ignore[index]
    graphs.begin(1)
    loss.backward()
    assert late == [(0, None)]


def test_a_backward_pass_of_a_model_that_has_moved_since_is_refused() -> None:
    model = network()
    graphs, late = watched(model)
    graphs.begin(0)
    loss = model(X).sum()
    graphs.moved("async")
    graphs.begin(1)
    with pytest.raises(ConfigError, match="Under policy 'async' a window may end at"):
        loss.backward()
    model(X).sum().backward()
    assert late == []


def test_copies_of_the_model_are_not_watched() -> None:
    model = network()
    graphs, _ = watched(model)
    graphs.begin(0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert each(X).requires_grad
        assert not graphs.is_live
    assert model(X).requires_grad
    assert graphs.is_live
    graphs.forget()
    assert not model._forward_hooks


def unseen(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss of a forward pass that calls no hook of the model."""
    out: torch.Tensor = model[2](model[1](model[0](x)))
    return out.mean()


@pytest.mark.parametrize("is_late", [True, False])
def test_what_no_hook_has_seen_is_refused_where_it_is_late(is_late: bool) -> None:
    model: Any = network()
    graphs = LiveGraph(model)
    graphs.begin_epoch(None, lambda batch: None)
    errors: list[str] = []

    def check(gradient: torch.Tensor) -> None:
        try:
            graphs.refuse_unseen()
        except ConfigError as error:
            errors.append(str(error))

    model[0].weight.register_hook(check)
    graphs.begin(0, x := X.clone())
    loss = unseen(model, x)
    for batch in (1, 2):
        if not is_late:
            loss.backward()
        graphs.begin(batch, x := X.clone())
        if is_late:
            (2 * loss).backward()
        loss = unseen(model, x)
    assert len(errors) == 2 * is_late
    assert all("torch.compile before elche.setup" in each for each in errors)


def test_a_batch_that_is_read_again_is_of_its_step_until_the_next_begins() -> None:
    """SAM, in a loop that fetches first; then the same batch beside the next."""
    graphs, late = LiveGraph(model := network()), []
    graphs.begin_epoch(lambda batch, other: late.append((batch, other)), print)
    first, second = X.clone(), X.clone()
    graphs.begin("a", first)
    loss = model(first).sum()
    graphs.begin("b", second)
    loss.backward()
    model(first).sum().backward()
    assert late == [("a", None)] * 2
    (model(second).sum() + model(first).sum()).backward()
    assert late == [("a", None)] * 2


@pytest.mark.parametrize("continues", [False, True])
def test_a_batch_may_be_skipped_where_the_loop_is_known(*, continues: bool) -> None:
    graphs = LiveGraph(model := network())
    graphs.begin_epoch(print, print)
    graphs.begin("a", X.clone())
    model(X).sum().backward()
    graphs.end_epoch()
    graphs.begin_epoch(print, print, continues=continues)
    graphs.begin("b", X.clone())
    graphs.begin("c", X.clone())
    with nullcontext() if continues else pytest.raises(ConfigError, match="ahead"):
        model(X).sum().backward()
