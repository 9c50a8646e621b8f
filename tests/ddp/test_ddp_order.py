"""Models that change under their wrapper, transports, and ranks without weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.transport.shared_memory import may_share_memory
from elche.ddp.reduction import MESSAGES
from elche.ddp.wrapper import DistributedDataParallel
from elche.devices import streams
from elche.errors import ConfigError
from tests.ddp.cases.ddp_cases import FEATURES, meeting, torch_world
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def _replaced(how: str) -> str:
    """A parameter is another object, or has other memory, than when it was wrapped."""
    x = torch.ones(4, FEATURES)
    with torch_world():
        model = _model()
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


def _deep(*scales: float) -> tuple[int, list[float]]:
    """Messages of a wrapper, and gradients; in one process if scaled."""
    torch.manual_seed(3)
    layers = [nn.Linear(FEATURES, FEATURES) for _ in range(7)]
    x = torch.arange(4.0 * FEATURES).view(4, FEATURES).sin().double()
    model: Any = nn.Sequential(*layers).double()
    if scales:
        model(torch.cat([scale * x for scale in scales])).square().mean().backward()
        return 0, [float(p.grad.sum()) for p in model.parameters()]
    with torch_world():
        model = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        for _ in range(3):
            model.zero_grad()
            model((1.0 + this_place().rank) * x).square().mean().backward()
        found = [float(p.grad.sum()) for p in model.parameters()]
        return len(model._reduction._exchanges), found


@pytest.mark.skipif(not may_share_memory(), reason="gloo sums buckets in place")
def test_more_buckets_than_messages_are_summed(ranks2: RankPool) -> None:
    _, known = _deep(1.0, 2.0)
    for messages, gradients in ranks2.run(_deep, case_setup=meeting):
        assert messages == MESSAGES
        assert gradients == pytest.approx(known, rel=1e-12)


def _weightless() -> list[torch.Tensor]:
    """Rank 0 weighs nothing, and its gradient is no number."""
    with torch_world():
        ddp = DistributedDataParallel(_model())
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
    streams.refuse_capture()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="does not replay the backward hooks"):
        streams.refuse_capture()
