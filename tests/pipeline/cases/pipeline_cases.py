"""Models that pipelines train in tests, and the same work in one plain process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elche.pipeline.peers import waits
from elche.pipeline.pipeline import Pipeline
from tests.harness.rank_main import this_place

WIDTH = 6
CALM: dict[str, Any] = {"timeout_s": 100.0}
"""Deadlines for ranks that a busy machine may keep from running for a while."""


@dataclass(frozen=True)
class Work:
    """What to train, on any number of ranks.

    `tests.harness.rank_pool` sends it to every rank.
    """

    model: str = "mlp"
    schedule: str = "1f1b"
    micro_batches: int = 4
    samples: int = 11
    sizes: tuple[int, ...] = ()
    steps: int = 2
    dtype: str = "float64"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """What came out: rank 0 has the whole state, each rank the losses."""

    state: dict[str, torch.Tensor]
    losses: list[float]
    input_gradient: torch.Tensor | None = None
    norm: float = 0.0
    evaluated: float | None = None


class Block(nn.Module):
    """A transformer block, causal."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Embed(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions[: x.shape[1]]


class Twice(nn.Module):
    """One weight for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) @ self.first.weight


class Dropped(nn.Module):
    """Dropout, outside and inside of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return checkpoint(self.body, x, use_reentrant=False)


class Autocast(nn.Module):
    """Matrix products in bfloat16, where parameters are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.down(torch.tanh(self.up(x)))


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.act(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(x[:, None])[0][:, 0]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Several(nn.Module):
    """Two inputs and two outputs, one of them twice, and plain values beside."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        a: torch.Tensor,
        b: torch.Tensor | None = None,
        count: int = 0,
        extra: dict[str, Any] | None = None,
    ) -> Any:
        b = a if b is None else b
        left = torch.tanh(self.left(a) + b)
        said = {"name": "x", "mask": left > 0, "none": None}
        assert extra is None or extra["name"] == "x"
        return left, self.right(b) * 0.5 + a, count + 1, said


class Sum(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
        return a + b


class Scaled(nn.Module):
    """Takes a keyword that is cut like the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, *, scale: torch.Tensor, shift: float
    ) -> torch.Tensor:
        return torch.tanh(self.body(x)) * scale[:, None] + shift


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence = torch.stack([x, x.flip(1), x * 2], 1)
        return x + self.body(sequence, sequence[:, :2], sequence[:, :2])[0][:, 0]


class Images(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None, :, None] * x[:, None, None, :]


def _mlp() -> list[nn.Module]:
    return [
        *(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8)),
        *(nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
    ]


def _around(*middle: nn.Module) -> list[nn.Module]:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), *middle, nn.Linear(WIDTH, 3)]
    while len(layers) < 8:
        layers.insert(2, nn.Linear(WIDTH, WIDTH))
    return layers


def _frozen(layers: list[nn.Module], count: int) -> list[nn.Module]:
    for layer in layers[:count]:
        layer.requires_grad_(False)
    return layers


def _gpt() -> list[nn.Module]:
    embed = Embed(11, 5, 8)
    head = nn.Linear(8, 11, bias=False)
    head.weight = embed.tokens.weight
    return [embed, *(Block(8) for _ in range(6)), head]


def _biases() -> list[nn.Module]:
    layers = _mlp()
    for layer in layers:
        for name, one in layer.named_parameters():
            one.requires_grad_(name == "bias")
    return layers


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": _mlp,
    "gpt": _gpt,
    "frozen-first": lambda: _frozen(_mlp(), 4),
    "frozen-some": lambda: _frozen(_around(*(Twice() for _ in range(5))), 1),
    "only-biases": _biases,
    "shared": lambda: _around(*(Twice() for _ in range(5))),
    "lstm": lambda: _around(*(Recurrent(nn.LSTM) for _ in range(5))),
    "dropout": lambda: _around(*(Dropped() for _ in range(5))),
    "autocast": lambda: _around(*(Autocast() for _ in range(5))),
    "in-place": lambda: [
        nn.Linear(WIDTH, WIDTH),
        *(InPlace() for _ in range(6)),
        nn.Linear(WIDTH, 3),
    ],
    "checkpoint": lambda: _around(*(Checkpointed(False) for _ in range(5))),
    "reentrant": lambda: _around(*(Checkpointed(True) for _ in range(5))),
    "several": lambda: [
        *(nn.Linear(WIDTH, WIDTH), *(Several() for _ in range(5))),
        *(Sum(), nn.Linear(WIDTH, 3)),
    ],
    "keywords": lambda: _around(*(Scaled() for _ in range(5))),
    "attention": lambda: _around(*(Attention() for _ in range(5))),
    "batchnorm": lambda: [
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.BatchNorm1d(WIDTH)),
        *(nn.Tanh(), nn.Linear(WIDTH, 3)),
    ],
    "convolution": lambda: [
        *(Images(), nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.ConvTranspose2d(3, 2, 2, 2), nn.Conv2d(2, 2, 2, groups=2)),
        *(nn.Flatten(), nn.Linear(98, 3)),
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {"dropout": {"seed": 3}}


def layers_for(work: Work) -> list[nn.Module]:
    torch.manual_seed(5)
    return [layer.to(dtype_of(work)) for layer in MODELS[work.model]()]


def dtype_of(work: Work) -> torch.dtype:
    found: torch.dtype = getattr(torch, work.dtype)
    return found


def data_for(work: Work, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batches of two sizes in turn, or of the sizes that were asked for."""
    generator = torch.Generator().manual_seed(step)
    sizes = work.sizes or (work.samples, work.samples + 1)
    count = sizes[step % len(sizes)]
    if work.model == "gpt":
        tokens = torch.randint(11, (count, 6 - step % 2), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    x = x.to(dtype_of(work))
    return x, torch.randint(3, (count,), generator=generator)


def keywords_for(work: Work, samples: int) -> dict[str, Any]:
    if work.model != "keywords":
        return {}
    scale = torch.linspace(0.5, 2, samples, dtype=dtype_of(work))
    return {"scale": scale, "shift": 0.25}


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def call(
    layers: list[nn.Module],
    value: Any,
    keywords: dict[str, Any],
    draw: tuple[int, int, int] | None = None,
) -> Any:
    """What a list of layers means; `draw` is seed, step and microbatch for dropout."""
    for number, layer in enumerate(layers):
        if draw is not None:
            seed, step, microbatch = draw
            torch.manual_seed(hash((seed, step, number, microbatch)) % (1 << 63))
        words = keywords if isinstance(layer, Scaled) else {}
        value = layer(*value) if isinstance(value, tuple) else layer(value, **words)
    return value


def plain(work: Work) -> Trained:
    """The work in one process: microbatches one after the other, plain autograd."""
    layers = layers_for(work)
    whole = nn.ModuleList(layers)
    optimizer = optimizer_for(list(whole.parameters()))
    losses, norm = [], 0.0
    seed = OPTIONS.get(work.model, {}).get("seed")
    x = torch.empty(0)
    for step in range(work.steps):
        x, y = data_for(work, step)
        x.requires_grad_(x.is_floating_point())
        words = keywords_for(work, len(x))
        total = 0.0
        optimizer.zero_grad()
        begin = 0
        for number, part in enumerate(x.tensor_split(work.micro_batches)):
            if not len(part):
                continue
            draw = None if seed is None else (seed, step, number)
            end = begin + len(part)
            cut = {
                k: v[begin:end] if isinstance(v, torch.Tensor) else v
                for k, v in words.items()
            }
            output = call(layers, part, cut, draw)
            loss = loss_of(output, y[begin:end]) * len(part) / len(x)
            loss.backward()
            total += loss.item()
            begin = end
        learning = [p for p in whole.parameters() if p.requires_grad]
        norm = float(nn.utils.clip_grad_norm_(learning, 0.5))
        optimizer.step()
        losses.append(total)
    evaluated = None
    if work.model != "convolution":
        x_last, y_last = data_for(work, 7)
        whole.eval()
        with torch.no_grad():
            words = keywords_for(work, len(x_last))
            evaluated = loss_of(call(layers, x_last, words), y_last).item()
    return Trained(dict(whole.state_dict()), losses, x.grad, norm, evaluated)


def piped(work: Work) -> Trained:
    """The work of one rank of a pipeline, of one rank or more."""
    with Pipeline(
        layers_for(work),
        loss_of,
        micro_batches=work.micro_batches,
        schedule=work.schedule,
        **CALM,
        **OPTIONS.get(work.model, {}),
        **work.options,
    ) as pipe:
        optimizer = optimizer_for(list(pipe.parameters()))
        losses, norm, gradient = [], 0.0, None
        for step in range(work.steps):
            x, y = data_for(work, step)
            pipe.zero_grad()
            out = pipe.step(
                x if pipe.is_first else None,
                y if pipe.is_last else None,
                input_gradients=True,
                **keywords_for(work, len(x)),
            )
            losses.append(out.loss)
            gradient = out.input_gradients[0] if out.input_gradients else None
            norm = pipe.clip_grad_norm_(0.5)
            optimizer.step()
        x, y = data_for(work, 7)
        evaluated = None
        if work.model != "convolution":
            evaluated = pipe.evaluate(x, y, **keywords_for(work, len(x))).loss
        state = pipe.state_dict(rank=0)
        return Trained(state, losses, gradient, norm, evaluated)


def optimizer_for(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # A rank may have nothing to train; SGD refuses an empty list.
    return torch.optim.SGD([*parameters, torch.zeros(1)], lr=0.1, momentum=0.9)


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest relative L2 distance of two states with the same names."""
    assert list(a) == list(b)
    return max(
        float((a[name].double() - b[name].double()).norm())
        / max(float(b[name].double().norm()), 1e-30)
        for name in a
    )


def hang(pipe: Pipeline | None) -> None:
    """Does nothing until the other ranks have ended the run, or minutes.

    Raises:
        RemoteRankError: they have.
    """
    assert pipe is not None
    assert pipe._communicator.peers is not None
    until_s = time.monotonic() + 150.0
    while time.monotonic() < until_s:
        pipe._communicator.peers.waits.check()
        threading.Event().wait(0.05)


def lose_patience(pipe: Pipeline, seconds: float) -> None:
    """From here on the waits of steps are short: all have come, one will hang."""
    stepping = pipe._stepping
    stepping.config = replace(stepping.config, timeout_s=seconds)


class Trouble(nn.Module):
    """A layer that does something wrong in one microbatch of the first step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.calls = 0
        self.pipe: Pipeline | None = None

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        if self.calls != 3:
            return self.body(x)
        if self.kind == "hangs":
            hang(self.pipe)
        if self.kind == "dies":
            os._exit(7)
        if self.kind == "raises":
            raise ValueError("a layer's own trouble")
        if self.kind == "object":
            return object()
        return self.kind if self.kind == "no tensor" else self.body(x)


def troubled(kind: str, schedule: str = "zb-h1") -> list[str]:
    """What each of some calls came to on this rank; "" where all was well."""
    place = this_place()
    middle = Trouble(kind) if place.rank == place.world_size - 2 else Trouble("")
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(place.world_size - 2)]
    layers += [middle, nn.Linear(WIDTH, 3)]
    loss_fn: Any = loss_of
    x, y = torch.randn(8, WIDTH), torch.randint(3, (8,))
    batches: list[tuple[Any, Any]] = [(x, y), (x, y)]
    if kind == "vector loss":
        loss_fn = partial(F.cross_entropy, reduction="none")
    if kind == "no batch":
        batches[0] = (None, y)
    if kind == "no target":
        batches[0] = (x, None)
    found: list[str] = []
    pipe = None
    try:
        pipe = Pipeline(layers, loss_fn, micro_batches=4, schedule=schedule, **CALM)
        middle.pipe = pipe
        if kind == "hangs":
            lose_patience(pipe, 5.0)
        for batch in batches:
            found.append(told(lambda batch=batch: pipe.step(*batch)))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    finally:
        if pipe is not None:
            pipe.close()
    return found


def told(call: Callable[[], Any]) -> str:
    """What a call came to; "" where all was well."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@dataclass
class Drawn:
    """Random numbers on one rank.

    Attributes:
        weights: of its layers as they were built, by the model's names.
        zeroed: of its dropout layers by name, what they let through in two steps.
        after: what the script draws afterwards.
    """

    weights: dict[str, torch.Tensor]
    zeroed: dict[str, torch.Tensor]
    after: torch.Tensor


def drawn(seed: int | None, replicas: int = 1, micro_batches: int = 2) -> Drawn:
    """Builds equal layers, and runs their dropout on ones, in a script that seeds."""
    torch.manual_seed(0)
    masks: list[list[torch.Tensor]] = []
    ones = torch.ones(2 * micro_batches, WIDTH)

    def layer() -> nn.Module:
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        masks.append([])

        def keep(_: Any, given: Any, output: torch.Tensor) -> None:
            masks[number].append((output == 0).detach())

        number = len(masks) - 1
        made[1].register_forward_hook(keep)
        return made

    with Pipeline(
        [layer] * 4,
        lambda output, target: (output * target).sum(),
        micro_batches=micro_batches,
        schedule="zb-v",
        loss_reduction="sum",
        replicas=replicas,
        seed=seed,
        **CALM,
    ) as pipe:
        weights = {n: p.detach().clone() for n, p in pipe.named_parameters()}
        for _ in range(2):
            pipe.step(ones, ones)
        names = [each.name for each in pipe.layers]
        zeroed = {n: torch.cat(m) for n, m in zip(names, masks, strict=True)}
        return Drawn(weights, zeroed, torch.rand(8))


def stopped(late_rank: int) -> tuple[list[str], float]:
    """A rank is stopped between two steps, until rank 0 or another has named it.

    Returns:
        Warnings of this rank, and the loss of the step that follows.
    """
    told: list[str] = []
    pids: list[int] = []

    class Wake(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            os.kill(pids[late_rank], signal.SIGCONT)

    handler = Wake(logging.WARNING)
    logger = logging.getLogger("elche.pipeline.peers.waits")
    logger.addHandler(handler)
    before, work = waits.NAMED_AFTER_S, Work()
    try:
        with Pipeline(MODELS["mlp"](), loss_of, micro_batches=4, **CALM) as pipe:
            pids += pipe._communicator.exchange(os.getpid(), "process ids")
            x, y = (
                one.float() if one.is_floating_point() else one
                for one in data_for(work, 0)
            )
            pipe.step(x, y)
            waits.NAMED_AFTER_S = 2.0
            if pipe.rank == late_rank:
                os.kill(os.getpid(), signal.SIGSTOP)
            return told, pipe.step(x, y).loss
    finally:
        waits.NAMED_AFTER_S = before
        logger.removeHandler(handler)


def constructed_again() -> list[str]:
    """What two impossible pipelines came to on this rank, and a step of a third."""

    def step(schedule: str) -> None:
        layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
        with Pipeline(layers, loss_of, micro_batches=4, schedule=schedule, **CALM) as p:
            p.step(torch.randn(8, WIDTH), torch.randint(3, (8,)))

    return [told(lambda one=one: step(one)) for one in ("2f2b", "2f2b", "1f1b")]
