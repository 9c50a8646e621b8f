"""A GPT-2 of transformers in a pipeline, as it comes, and in one process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from elche.pipeline.pipeline import Pipeline
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import CALM, optimizer_for
from tests.pipeline.cases.pipeline_cut_cases import parts_of, slow_down
from tests.pipeline.cases.pipeline_generation_cases import Told

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


@dataclass(frozen=True)
class Tokens:
    """What to generate, and how the model is cut.

    Attributes:
        family: of the model.
        schedule: of the pipeline.
        points: where it is cut.
        padded: sequences are of different lengths, with padding on their left.
        samples: draws tokens instead of taking the likeliest.
    """

    family: str = "gpt2"
    schedule: str = "1f1b"
    points: tuple[str, ...] | None = None
    padded: bool = False
    samples: bool = False


@dataclass
class GeneratedTokens:
    """What came out on a rank.

    Attributes:
        tokens: of one sequence, of several, and again.
        lengths: positions that the rank's first block was given, in the last time.
        left: caches that are still there.
        warnings: of this rank.
    """

    tokens: list[torch.Tensor]
    lengths: list[int]
    left: int
    warnings: list[str]


NEW_TOKENS = 6
PADDING = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])


def prompts(work: Tokens) -> list[torch.Tensor]:
    several = torch.tensor([[2, 5, 7, 1], [0, 0, 3, 8], [0, 4, 4, 9]])
    return [several, several] if work.padded else [prompt(), several, several]


def model_of(work: Tokens) -> Any:
    if work.family == "gpt2":
        return gpt2().eval()
    torch.manual_seed(3)
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).double().eval()


def padded(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions are counted from the first token that is one, as transformers does."""
    new = tokens.new_ones(len(tokens), tokens.shape[1] - PADDING.shape[1])
    mask = torch.cat([PADDING[: len(tokens)], new], 1)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": places}


def choosing(work: Tokens) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        if not work.samples:
            return logits.argmax(-1)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    return choose


@torch.no_grad()
def tokens_alone(work: Tokens) -> list[torch.Tensor]:
    """By transformers' own `generate`, or with its own cache where tokens are drawn."""
    model, choose, found = model_of(work), choosing(work), []
    for tokens in prompts(work):
        mask = PADDING if work.padded else torch.ones_like(tokens)
        if not work.samples:
            made = model.generate(
                input_ids=tokens,
                attention_mask=mask,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        else:
            made, cache = tokens, DynamicCache()
            for _ in range(NEW_TOKENS):
                new = made[:, cache.get_seq_length() :]
                logits = model(new, past_key_values=cache, use_cache=True).logits
                made = torch.cat([made, choose(logits[:, -1])[:, None]], 1)
        found.append(made)
    return found


def tokens_piped(work: Tokens) -> GeneratedTokens:
    """The same on a rank of a pipeline."""
    model, lengths = model_of(work), []
    kept: list[weakref.ref[Any]] = []

    def watch(block: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if type(given[0].shape[1]) is int:
            lengths.append((id(block), given[0].shape[1]))
            cache = (*given[1:2], keywords.get("past_key_values"))[0]
            kept.extend([weakref.ref(cache)] if cache is not None else [])

    inner = model.transformer.h if work.family == "gpt2" else model.model.layers
    for block in inner:
        block.register_forward_pre_hook(watch, with_kwargs=True)
    sample: dict[str, Any] = {"use_cache": False}
    sample |= (
        padded(prompts(work)[0]) if work.padded else {"input_ids": prompts(work)[1]}
    )
    handler, logger = Told(), logging.getLogger("elche.pipeline.step.generation")
    logger.addHandler(handler)
    try:
        with Pipeline(
            model,
            loss_of,
            micro_batches=2,
            schedule=work.schedule,
            sample=sample,
            split_points=work.points,
            **CALM,
        ) as pipe:
            options: dict[str, Any] = {"batch_of": padded} if work.padded else {}
            choose, found = choosing(work), []
            for tokens in prompts(work):
                lengths.clear()
                made = pipe.generate(
                    tokens if pipe.is_first else None,
                    max_new_tokens=NEW_TOKENS,
                    choose=choose,
                    **options,
                )
                found.append(made)
        first = [length for block, length in lengths if block == lengths[0][0]]
        left = sum(one() is not None for one in kept)
        assert kept
        return GeneratedTokens(found, first, left, handler.told)
    finally:
        logger.removeHandler(handler)
