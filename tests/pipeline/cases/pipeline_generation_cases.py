"""Causal layers that keep keys and values, in a pipeline and in one process."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elche.pipeline.pipeline import Pipeline
from tests.harness.logged import logged
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import CALM, told

WIDTH, HEADS, VOCABULARY, LENGTH, BLOCKS = 8, 2, 11, 16, 4
PROMPTS = (
    torch.tensor([[3]]),
    torch.tensor([[1, 2, 9], [7, 5, 0], [3, 3, 1], [10, 0, 4], [4, 9, 2]]),
)
"""Of one sequence, and of more than there are microbatches."""
NEW = 5
Cache = dict[str, Any]


class Embed(nn.Module):
    """Tokens at their positions, which it counts in the cache.

    Args:
        counts: whether it does.
    """

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        begin = 0
        if cache is not None and self.counts:
            begin = cache.get("length", 0)
            cache["length"] = begin + tokens.shape[1]
        places = torch.arange(begin, begin + tokens.shape[1])
        return self.tokens(tokens) + self.positions(places)


class Attention(nn.Module):
    """Attention to itself and all before.

    Attributes:
        lengths: positions of each call.
        kept: what it has put into caches.
        fails_at: what happens in a call of this number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.lengths: list[int] = []
        self.kept: list[weakref.ref[torch.Tensor]] = []
        self.fails_at: dict[int, Callable[[], Any]] = {}

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        self.lengths.append(x.shape[1])
        self.fails_at.get(len(self.lengths), int)()
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k = torch.cat([cache["k"], k], 2)
                v = torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
            self.kept += [weakref.ref(k), weakref.ref(v)]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class NoCache(nn.Module):
    """Attention that sees no more than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Forgetful(Attention):
    """Keeps its last call's keys and values only: wrong from the third call on."""

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        found = super().forward(x, cache)
        if cache is not None:
            for name in ("k", "v"):
                cache[name] = cache[name][:, :, -x.shape[1] :]
        return found


class RuledOut(nn.Module):
    """The logits, of which one token's is that of none."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([0]), -torch.inf)


class Masked(Attention):
    """Attention that is told of positions that hold nothing, and hands that on."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, mask: torch.Tensor, cache: Cache | None = None
    ) -> Any:
        return super().forward(x * mask[..., None], cache), mask


class MaskedEmbed(Embed):
    """As `Embed`, of tokens that may hold nothing."""

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, mask: torch.Tensor, cache: Cache | None = None
    ) -> Any:
        return super().forward(tokens, cache), mask.double()


class MaskedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.out(x)


def layers_of(kind: str) -> list[nn.Module]:
    """All take a cache; or one of them ("counts"), or all ("none") do not."""
    torch.manual_seed(5)
    made: list[nn.Module]
    if kind == "masked":
        masked = [Masked() for _ in range(BLOCKS)]
        made = [MaskedEmbed(), *masked, MaskedHead()]
    else:
        made = [Embed(kind not in ("counts", "none"))]
        made += [Attention() for _ in range(BLOCKS)]
        made += [nn.Linear(WIDTH, VOCABULARY)]
    if kind == "forgets":
        made[2] = Forgetful()
    if kind == "rules out":
        made.append(RuledOut())
    if kind == "none":
        made[0] = _Plain(made[0])
        made[1 : 1 + BLOCKS] = [NoCache() for _ in range(BLOCKS)]
    for layer in made:
        for one in layer.parameters():
            one.data.mul_(2.0)  # so that it does not repeat one token
    return [layer.double() for layer in made]


class _Plain(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


@dataclass(frozen=True)
class GenerationWork:
    """What to generate.

    Attributes:
        kind: of the layers.
        schedule: of the pipeline.
        partition: of it.
        end_token: that ends a sequence.
        options: of `generate`.
    """

    kind: str = "all"
    schedule: str = "1f1b"
    partition: tuple[int, ...] | None = None
    end_token: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Generated:
    """What came out on a rank.

    Attributes:
        tokens: for each prompt, generated twice.
        lengths: of the calls of the rank's first attention, in the second time.
        left: tensors in caches that are still there.
        warnings: of this rank.
    """

    tokens: list[torch.Tensor]
    lengths: list[list[int]]
    left: int
    warnings: list[str]


def with_mask(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tokens": tokens, "mask": tokens != 0}


def alone(work: GenerationWork) -> list[torch.Tensor]:
    """In one process, with its own caches."""
    layers = layers_of(work.kind)
    found = []
    for tokens in (*PROMPTS, *PROMPTS):
        made, ended = tokens, torch.zeros(len(tokens), dtype=torch.bool)
        caches: list[Cache] = [{} for _ in layers]
        for _ in range(NEW):
            following = run(layers, caches, made, work.kind).argmax(-1)
            if work.end_token is not None:
                following[ended] = work.end_token
                ended |= following == work.end_token
            made = torch.cat([made, following[:, None]], 1)
            if ended.all():
                break
        found.append(made)
    return found


@torch.no_grad()
def run(
    layers: Sequence[nn.Module], caches: list[Cache], made: torch.Tensor, kind: str
) -> torch.Tensor:
    """The last position's logits; with caches where all layers take them."""
    is_cached = kind in ("all", "masked", "rules out")
    done = caches[0].get("length", 0) if is_cached else 0
    value: Any = (made[:, done:],)
    if kind == "masked":
        value = (value[0], value[0] != 0)
    for layer, cache in zip(layers, caches, strict=True):
        takes = is_cached and isinstance(layer, (Embed, Attention))
        found = layer(*value, **({"cache": cache} if takes else {}))
        value = found if isinstance(found, tuple) else (found,)
    logits: torch.Tensor = value[0]
    return logits[:, -1]


def generated(work: GenerationWork) -> Generated:
    """On one rank of a pipeline, each prompt twice."""
    layers = layers_of(work.kind)
    cut = {"schedule": work.schedule, "partition": work.partition}
    with (
        logged("elche.pipeline.step.generation") as warnings,
        Pipeline(layers, F.mse_loss, micro_batches=2, **cut, **CALM) as pipe,
    ):
        mine = _attention(pipe)
        options: dict[str, Any] = dict(work.options)
        if work.kind == "masked":
            options["batch_of"] = with_mask
        found, lengths = [], []
        for prompt in (*PROMPTS, *PROMPTS):
            mine.lengths.clear()
            tokens = pipe.generate(
                prompt if pipe.is_first else None,
                max_new_tokens=NEW,
                end_token=work.end_token,
                **options,
            )
            found.append(tokens)
            lengths.append(list(mine.lengths))
        left = sum(one() is not None for one in mine.kept)
        return Generated(found, lengths[2:], left, warnings)


def _attention(pipe: Pipeline) -> Attention:
    """The first one of this rank."""
    return next(
        one
        for layer in pipe.layers
        for one in layer.module.modules()
        if isinstance(one, Attention)
    )


def failing(kind: str, rank: int) -> tuple[list[str], int]:
    """What calls come to of which the first fails in a layer of one rank."""
    layers, found = layers_of("all"), []
    pipe = Pipeline(layers, F.mse_loss, micro_batches=1, partition=(3, 3), **CALM)
    try:
        mine = _attention(pipe)
        batch_of = _raise_behind if kind == "batch_of" else _same
        if this_place().rank == rank and kind != "batch_of":
            # Two calls of each of the first tokens, which are compared; then one.
            mine.fails_at[7] = {"raises": _raise, "dies": lambda: os._exit(7)}[kind]
        for _ in range(2):
            generate = partial(pipe.generate, PROMPTS[0], max_new_tokens=NEW)
            found.append(told(partial(generate, batch_of=batch_of)))
            batch_of = _same
        gc.collect()
        return found, sum(one() is not None for one in mine.kept)
    finally:
        pipe.close()


def _same(tokens: torch.Tensor) -> torch.Tensor:
    return tokens


def _raise_behind(tokens: torch.Tensor) -> torch.Tensor:
    if tokens.shape[1] == NEW:
        _raise()
    return tokens


def _raise() -> None:
    raise ValueError("a layer's own trouble")
