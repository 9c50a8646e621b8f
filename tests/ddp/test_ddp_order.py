"""Several wrappers in one group, and models that change under their wrapper."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.gradients import graph_capture
from elche.comm.transport.exchange import can_share
from elche.ddp import group as ddp_group
from elche.ddp.wrapper import DistributedDataParallel
from elche.errors import CommunicationError, ConfigError
from tests.ddp.cases.ddp_cases import FEATURES, STORE, meeting, torch_world
from tests.distributed.patience import all_here, lose_patience
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


class Generator(nn.Sequential):
    """One of two models."""


class Critic(nn.Sequential):
    """The other one."""


def _models(sizes: tuple[int, int]) -> list[nn.Module]:
    torch.manual_seed(3)
    kinds = (Generator, Critic)
    return [
        kind(nn.Linear(FEATURES, size), nn.BatchNorm1d(size), nn.Linear(size, 1))
        for kind, size in zip(kinds, sizes, strict=True)
    ]


def _out_of_step(transport: str, sizes: tuple[int, int], good_steps: int) -> str:
    """Backward passes of two models in one group, in another order on rank 1."""
    rank, x = this_place().rank, torch.ones(4, FEATURES)
    roll_call_s, ddp_group.ROLL_CALL_S = ddp_group.ROLL_CALL_S, 100.0
    with torch_world():
        options: dict[str, Any] = {"transport": transport}
        models = [
            DistributedDataParallel(model, bucket_cap_mb=cap, **options)
            for model, cap in zip(_models(sizes), (1.0, 1e-4), strict=True)
        ]
        try:
            for step in range(good_steps + 1):
                turned = rank == 1 and step == good_steps
                if step == good_steps and transport == "auto":
                    all_here(os.environ[STORE])
                    for model in models:
                        lose_patience(model._group, 1.0)
                for model in models[::-1] if turned else models:
                    model(x).sum().backward()
        except CommunicationError as error:
            return str(error)
        finally:
            ddp_group.ROLL_CALL_S = roll_call_s
    return "reduced"


@pytest.mark.parametrize(
    ("transport", "sizes", "good_steps"),
    [
        ("auto", (5, 5), 0),
        ("auto", (5, 40), 1),
        ("gloo", (5, 5), 0),
        ("gloo", (5, 5), 1),
        ("gloo", (5, 40), 1),  # where gloo would end the process
    ],
)
def test_models_out_of_step_are_both_named(
    ranks2: RankPool, transport: str, sizes: tuple[int, int], good_steps: int
) -> None:
    """In shared memory the deadline tells, elsewhere the ranks; and what was mixed."""
    texts = ranks2.run(_out_of_step, transport, sizes, good_steps, case_setup=meeting)
    for text in texts:
        assert "ranks " in text
        assert "out of step" in text, text
        assert re.search(r"Generator|Critic", text), text
        assert len(set(re.findall(r"wrapper (\d+)", text))) == 2, text


def _replaced(how: str) -> str:
    """A parameter is another object, or has other memory, than when it was wrapped."""
    x = torch.ones(4, FEATURES)
    with torch_world():
        model = _models((5, 5))[0]
        ddp = DistributedDataParallel(model)
        layer: Any = model[0]
        try:
            ddp(x).sum().backward()
            if how == "object":
                layer.weight = nn.Parameter(layer.weight.detach().clone())
            elif how == "dtype":
                ddp.double()
            else:
                layer.weight.data = layer.weight.detach().clone()
            ddp.zero_grad()
            (ddp(x) * (1.0 + this_place().rank)).square().sum().backward()
        except ConfigError as error:
            return str(error)
        return f"reduced {float(layer.weight.grad.sum()):.6f}"


def test_a_replaced_parameter_is_refused_and_new_memory_is_not(
    ranks2: RankPool,
) -> None:
    texts = ranks2.run(_replaced, "object", case_setup=meeting)
    assert all(text.startswith("0.weight was replaced after the") for text in texts)
    texts = ranks2.run(_replaced, "dtype", case_setup=meeting)
    says = "0.weight was torch.float32 when the model was wrapped and is torch.float64"
    assert all(text.startswith(says) for text in texts)
    first, second = ranks2.run(_replaced, "memory", case_setup=meeting)
    assert first == second
    assert first.startswith("reduced")


def _carriers(transport: str) -> set[str]:
    """What carries the messages of a wrapper."""
    with torch_world():
        options: dict[str, Any] = {"transport": transport}
        ddp = DistributedDataParallel(_models((5, 5))[0], **options)
        return {type(b.exchange).__name__ for b in ddp._built.reducer._pass.buckets}


def test_the_transport_is_what_was_asked_for(ranks2: RankPool) -> None:
    shared = "SharedExchange" if can_share("CPU") else "GlooExchange"
    for transport, known in (("auto", shared), ("gloo", "GlooExchange")):
        found = ranks2.run(_carriers, transport, case_setup=meeting)
        assert found == [{known}] * 2


def _weightless() -> Any:
    """Rank 0 weighs nothing, and its gradient is no number."""
    with torch_world():
        ddp = DistributedDataParallel(_models((5, 5))[0])
        found = []
        for _ in range(2):  # the first pass knows all weights, the next guesses
            ddp.zero_grad()
            x = torch.arange(24.0).view(4, FEATURES).sin()
            is_first = this_place().rank == 0
            if is_first:
                ddp.set_weight(0.0)
            loss = ddp(x).sum() * (float("nan") if is_first else 1.0)
            loss.backward()
            found += [p.grad.clone() for p in ddp.parameters()]
        return found


def test_a_rank_that_weighs_nothing_sends_zeros_not_nothing_times_nan(
    ranks2: RankPool,
) -> None:
    first, second = ranks2.run(_weightless, case_setup=meeting)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())
    assert any(bool(one.any()) for one in first)


def test_a_captured_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA stream that is being captured, which this machine has not got."""
    graph_capture.refuse_capture()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="hooks in the backward pass, which a CUDA"):
        graph_capture.refuse_capture()
