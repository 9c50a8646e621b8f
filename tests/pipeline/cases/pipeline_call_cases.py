"""Calls of a running pipeline that are wrong, each followed by one that is right."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

from elche.pipeline.peers import waits
from elche.pipeline.pipeline import Pipeline
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import CALM, WIDTH, Scaled, loss_of, told

SAMPLES = 8


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % 3


def pipeline(layers: list[nn.Module] | None = None, **options: Any) -> Pipeline:
    torch.manual_seed(3)
    made = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)]
    return Pipeline(
        made if layers is None else layers,
        options.pop("loss_fn", loss_of),
        micro_batches=4,
        **{"schedule": "zb-h1", **CALM, **options},
    )


def wrong_calls() -> tuple[dict[str, str], bool]:
    """What wrong steps came to, and whether a right one is as before them."""
    rank = this_place().rank
    x, y = data()

    def without_gradients(on: bool) -> Any:
        return torch.no_grad() if on else nullcontext()

    def under(on: bool) -> Any:
        with without_gradients(on):
            return pipe.step(x, y)

    with pipeline() as pipe:
        pipe.step(x, y)
        nn.utils.clip_grad_value_(pipe.parameters(), 1e9)
        right = [one.grad.clone() for one in pipe.parameters() if one.grad is not None]
        calls: dict[str, Callable[[], Any]] = {
            "unknown keyword": lambda: pipe.step(x, y, scale=2.0),
            "unknown keyword of evaluate": lambda: pipe.evaluate(x, y, scael=2.0),
            "keyword of one rank": lambda: pipe.step(
                x, y, **({"a": 1} if rank else {})
            ),
            "no gradients": lambda: under(True),
            "no gradients on one rank": lambda: under(rank == 0),
            "a named tuple": lambda: pipe.step(OrderedDict(a=x), y),
            "a sparse batch": lambda: pipe.step(x.to_sparse(), y),
            "a sparse target": lambda: pipe.step(x, torch.eye(SAMPLES).to_sparse()),
            "a scale of zero": lambda: pipe.step(x, y, loss_scale=0.0),
            "a scale that is none": lambda: pipe.step(x, y, loss_scale=float("nan")),
            "a scale of text": lambda: pipe.step(x, y, loss_scale="2"),  # type: ignore[arg-type]
            "two scales": lambda: pipe.step(x, y, loss_scale=2.0 + rank),
            "unscaled by zero": lambda: pipe.unscale_(0.0),
            "unscaled by two": lambda: pipe.unscale_(2.0 + rank),
            "a negative norm": lambda: pipe.clip_grad_norm_(-1.0),
            "a norm that is none": lambda: pipe.clip_grad_norm_(float("nan")),
            "a norm of text": lambda: pipe.clip_grad_norm_("1"),  # type: ignore[arg-type]
            "a negative norm on one rank": lambda: pipe.clip_grad_norm_(1.0 - 2 * rank),
            "torch's clipping": lambda: nn.utils.clip_grad_norm_(
                pipe.parameters(), 1.0
            ),
            "two norms": lambda: pipe.clip_grad_norm_(1.0 + rank),
            "two kinds of call": lambda: (
                pipe.clip_grad_norm_(1.0) if rank else pipe.step(x, y)
            ),
            "state and step": lambda: pipe.state_dict() if rank else pipe.step(x, y),
            "state for others": lambda: pipe.state_dict(None if rank else 0),
            "outputs elsewhere": lambda: pipe.evaluate(
                x, outputs="last" if rank else "all"
            ),
            "outputs of no rank": lambda: pipe.evaluate(x, outputs=2),
            "a copy": lambda: copy.deepcopy(pipe),
        }
        found = {name: told(call) for name, call in calls.items()}
        pipe.zero_grad()
        pipe.step(x, y)
        again = [one.grad for one in pipe.parameters() if one.grad is not None]
        same = [torch.equal(a, b) for a, b in zip(right, again, strict=True)]
        return found, all(same)


def arrays() -> tuple[list[float], list[str]]:
    """Losses of a batch as tensors and as arrays; what arrays of no numbers come to."""
    x, y = data()
    with pipeline() as pipe:
        losses = [
            pipe.step(x, y).loss,
            pipe.step(x.numpy(), y.numpy()).loss,
            pipe.evaluate(x.numpy(), y.numpy()).loss,
        ]
        words = y.numpy().astype(str)
        wrong = [
            told(lambda: pipe.step(x, words)),
            told(lambda: pipe.step(x.numpy()[::-1], y)),
        ]
    return [float(one or 0.0) for one in losses], wrong


def keywords_where_taken() -> list[str]:
    """Keywords of layers on both ranks, given in several ways."""
    rank = this_place().rank
    x, y = data()
    words = {"scale": torch.ones(SAMPLES), "shift": 0.5}
    layers = [Scaled(), nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, 3)]
    with pipeline(layers, partition=(2, 2)) as pipe:
        return [
            told(lambda: pipe.step(x, y, **words)),
            told(lambda: pipe.step(x, y, **(words if rank == 0 else {}))),
            told(lambda: pipe.step(x, y, **words, other=1)),
            told(lambda: pipe.step(x, y, **words)),
        ]


class Named(nn.Module):
    """Returns a mapping of its own, as models of other libraries do."""

    def forward(self, x: torch.Tensor) -> Any:
        return OrderedDict(logits=x, shape=(x * 2, [x + 1]))


def outputs_by_choice(replicas: int) -> dict[str, bool]:
    """Whether this rank got its replica's outputs when it was to, and only then."""
    rank, last = this_place().rank, 1
    x, _ = data()
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), Named()]
    expected = layers[1](layers[0](x))
    found = {}
    with pipeline(layers, replicas=replicas) as pipe:
        for samples in (SAMPLES, 3, 1):
            want = expected[:samples]
            for wanted in ("last", "all", 0, 1):
                got = pipe.evaluate(x[:samples], outputs=wanted).outputs  # type: ignore[arg-type]
                is_asked = wanted in ("all", rank)
                if wanted == "last":
                    is_asked = replicas == 2 or rank == last
                is_right = (got is not None) == is_asked
                if is_asked and got is not None:
                    values = (want, want * 2, want + 1)
                    told = (got["logits"], got["shape"][0], got["shape"][1][0])
                    is_right = type(got) is dict and all(
                        map(torch.allclose, told, values)
                    )
                found[f"{wanted} of {samples}"] = is_right
    return found


def loaded() -> list[str]:
    """What states of other models come to."""
    with pipeline() as pipe:
        state = pipe.state_dict()
        texts = [
            told(lambda: pipe.load_state_dict({**state, "9.weight": torch.ones(1)})),
            told(lambda: pipe.load_state_dict({**state, "0.wieght": torch.ones(1)})),
            told(lambda: pipe.load_state_dict({**state, "2.bias": torch.ones(1)})),
            told(lambda: pipe.load_state_dict({**state, "0._extra_state": 1})),  # type: ignore[dict-item]
            told(lambda: pipe.load_state_dict(state)),
        ]
    return texts


def leaves(kind: str) -> str:
    """Rank 1 leaves between two steps; what the other's second step came to."""
    x, y = data()

    def train() -> None:
        with pipeline() as pipe:
            pipe.step(x, y)
            if this_place().rank == 1 and kind == "closes":
                return
            if this_place().rank == 1:
                raise KeyboardInterrupt("Ctrl-C")
            reason_within_s = 0.1 if kind == "closes" else waits.REASON_WITHIN_S
            with mock.patch.object(waits, "REASON_WITHIN_S", reason_within_s):
                pipe.step(x, y)

    return told(train)
