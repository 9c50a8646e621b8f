"""A GPT-2 of transformers in a pipeline, as it comes, and in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from elche.pipeline.pipeline import Pipeline
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import CALM, optimizer_for
from tests.pipeline.cases.pipeline_cut_cases import parts_of, slow_down

WORDS, LAYERS, LENGTH, MICRO_BATCHES = 29, 6, 9, 4
SIZES = (8, 3, 1)


@dataclass(frozen=True)
class Gpt2:
    """How it is cut and run."""

    schedule: str = "zb-h1"
    points: tuple[str, ...] | None = None
    masked: bool = False
    slow: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What training came to, and tokens that were generated then."""

    losses: list[float]
    evaluated: float | None
    state: dict[str, torch.Tensor]
    tokens: torch.Tensor
    layers: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Of the layers of an automatic cut, those with most of the work."""


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=16,
        n_head=2,
        vocab_size=WORDS,
        n_positions=32,
        bos_token_id=None,
        eos_token_id=None,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        initializer_range=0.3,
    )
    return GPT2LMHeadModel(config).double()


def data(step: int, masked: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    count = SIZES[step]
    tokens = torch.randint(WORDS, (count, LENGTH - step + 1), generator=generator)
    batch = {"input_ids": tokens[:, :-1].contiguous()}
    if masked:
        mask = torch.ones_like(batch["input_ids"])
        mask[::2, :2] = 0  # padding on the left
        batch["attention_mask"] = mask
    return batch, tokens[:, 1:].contiguous()


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def prompt() -> torch.Tensor:
    return torch.tensor([[2, 5, 7]])


def with_mask(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def alone(work: Gpt2) -> Outcome:
    model = gpt2()
    optimizer = optimizer_for(list(model.parameters()))
    losses = []
    for step in range(len(SIZES)):
        batch, target = data(step, work.masked)
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(
            parts_of(batch, MICRO_BATCHES), parts_of(target, MICRO_BATCHES), strict=True
        ):
            output = model(**part, use_cache=False)
            loss = loss_of(output, wanted) * len(wanted) / len(target)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        batch, target = data(2, work.masked)
        evaluated = loss_of(model(**batch), target).item()
    tokens = model.generate(**with_mask(prompt()), max_new_tokens=8, do_sample=False)
    return Outcome(losses, evaluated, model.state_dict(), tokens)


def piped(work: Gpt2) -> Outcome:
    model = gpt2()
    if work.slow is not None:
        is_slow = this_place().rank == work.slow
        for block in model.transformer.h:
            slow_down(block, 0.006 if is_slow else 0.002)
    sample: dict[str, Any] = {"use_cache": False, **data(1, work.masked)[0]}
    with Pipeline(
        model,
        loss_of,
        micro_batches=MICRO_BATCHES,
        schedule=work.schedule,
        sample=sample,
        split_points=work.points,
        **CALM,
        **work.options,
    ) as pipe:
        optimizer = optimizer_for(list(pipe.parameters()))
        losses = []
        for step in range(len(SIZES)):
            pipe.zero_grad()
            losses.append(pipe.step(*data(step, work.masked)).loss)
            optimizer.step()
        evaluated = pipe.evaluate(*data(2, work.masked)).loss
        tokens = pipe.generate(
            prompt(),
            max_new_tokens=8,
            batch_of=with_mask if work.masked else lambda tokens: tokens,
        )
        state = pipe.state_dict()
        gpt2().load_state_dict(state)
        layers, blocks = [0] * pipe.world_size, [0] * pipe.world_size
        first = 0
        for rank, count in zip(pipe.schedule.placement, pipe.partition, strict=True):
            layers[rank] += count
            held = range(first, first := first + count)
            blocks[rank] += sum(1 <= layer <= LAYERS for layer in held)
        return Outcome(losses, evaluated, state, tokens, layers, blocks)
