"""Models of transformers that choose tokens: in a pipeline, and in one process."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from elche.pipeline.pipeline import Pipeline
from tests.harness.logged import logged
from tests.pipeline.cases.pipeline_cases import CALM

WORDS, LAYERS = 29, 6


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


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def prompt() -> torch.Tensor:
    return torch.tensor([[2, 5, 7]])


@dataclass(frozen=True)
class Tokens:
    """What to generate, and how the model is cut.

    Attributes:
        family: of the model.
        schedule: of the pipeline.
        points: where it is cut.
        padded: sequences are of different lengths, with padding on their left.
    """

    family: str = "gpt2"
    schedule: str = "1f1b"
    points: tuple[str, ...] | None = None
    padded: bool = False


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
    kind, make = (
        (LlamaConfig, LlamaForCausalLM)
        if work.family == "llama"
        else (Qwen3Config, Qwen3ForCausalLM)
    )
    config = kind(
        num_hidden_layers=LAYERS,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=WORDS,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return make(config).double().eval()


def padded(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions are counted from the first token that is one, as transformers does."""
    new = tokens.new_ones(len(tokens), tokens.shape[1] - PADDING.shape[1])
    mask = torch.cat([PADDING[: len(tokens)], new], 1)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": places}


@torch.no_grad()
def tokens_alone(work: Tokens) -> list[torch.Tensor]:
    """By transformers' own `generate`."""
    model, found = model_of(work), []
    for tokens in prompts(work):
        mask = PADDING if work.padded else torch.ones_like(tokens)
        made = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        found.append(made)
    return found


def tokens_piped(work: Tokens) -> GeneratedTokens:
    """The same on a rank of a pipeline."""
    model, lengths = model_of(work), []
    kept: list[weakref.ref[Any]] = []

    def watch(block: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if type(given[0].shape[1]) is int:
            lengths.append((id(block), given[0].shape[1]))
            named = keywords.get("cache", keywords.get("past_key_values"))
            cache = (*given[1:2], named)[0]
            kept.extend([weakref.ref(cache)] if cache is not None else [])

    inner = model.transformer.h if work.family == "gpt2" else model.model.layers
    for block in inner:
        block.register_forward_pre_hook(watch, with_kwargs=True)
    sample: dict[str, Any] = {"use_cache": False}
    sample |= (
        padded(prompts(work)[0]) if work.padded else {"input_ids": prompts(work)[1]}
    )
    options: dict[str, Any] = {"batch_of": padded} if work.padded else {}
    with (
        logged("elche.pipeline.step.generation") as warnings,
        Pipeline(
            model,
            loss_of,
            micro_batches=2,
            schedule=work.schedule,
            sample=sample,
            split_points=work.points,
            **CALM,
        ) as pipe,
    ):
        found = []
        for tokens in prompts(work):
            lengths.clear()
            made = pipe.generate(
                tokens if pipe.is_first else None, max_new_tokens=NEW_TOKENS, **options
            )
            found.append(made)
    first = [length for block, length in lengths if block == lengths[0][0]]
    left = sum(one() is not None for one in kept)
    assert kept
    return GeneratedTokens(found, first, left, warnings)
