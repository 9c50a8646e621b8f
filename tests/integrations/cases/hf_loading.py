"""Models of transformers from the meta device, with weights from files, and alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from elche.checkpoint.weight_files import WeightFiles
from elche.pipeline.pipeline import Pipeline
from tests.integrations.cases.hf_pipeline import (
    NEW_TOKENS,
    WORDS,
    Tokens,
    model_of,
    prompt,
)
from tests.pipeline.cases.pipeline_cases import CALM

IDS = torch.arange(1, 1 + 6 * 7).reshape(6, 7) % WORDS
MICRO_BATCHES = 2


@dataclass
class Trained:
    """One step, and then an evaluation and tokens without labels.

    Attributes:
        loss: of the step.
        gradients: by name.
        logits: of the evaluation.
        tokens: that were generated.
        read: names that the rank has read from files.
        own: names of the rank's tensors, of tied ones all.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    logits: torch.Tensor | None
    tokens: torch.Tensor
    read: set[str]
    own: set[str]


def labelled(output: Any, _: Any) -> Any:
    """The loss that the model itself has computed, as transformers' Trainer has it."""
    return output.loss


def alone(family: str, folder: Path) -> Trained:
    """In one process, of a model with all weights, which are saved to files."""
    model = model_of(Tokens(family))
    with torch.no_grad():  # other values than those that a rank would initialise
        for one in model.parameters():
            one.add_(0.1 * torch.randn_like(one))
    model.save_pretrained(folder, max_shard_size="10KB")
    parts = IDS.chunk(MICRO_BATCHES)
    losses = [model(input_ids=one, labels=one).loss / len(parts) for one in parts]
    torch.stack(losses).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        tokens = model.generate(
            prompt(),
            attention_mask=torch.ones_like(prompt()),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    loss = sum(one.item() for one in losses)
    return Trained(loss, gradients, logits, tokens, set(), set())


def loaded(family: str, folder: Path, schedule: str, replicas: int = 1) -> Trained:
    """The same on a rank that reads its own layers only; replicas choose no tokens."""
    with torch.device("meta"):
        model = model_of(Tokens(family))
    read: set[str] = set()
    get = WeightFiles.__getitem__

    def seen(files: WeightFiles, name: str) -> torch.Tensor:
        read.add(name)
        return get(files, name)

    batch = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    with Pipeline(
        model,
        labelled,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        sample={
            name: one[:2, :5] if name != "use_cache" else one  # shorter than the batch
            for name, one in batch.items()
        },
        init="load",
        replicas=replicas,
        split_batches=True,
        **CALM,
    ) as pipe:
        with patch.object(WeightFiles, "__getitem__", seen):
            pipe.load(folder)
        loss = pipe.step(batch, IDS).loss
        gradients = {n: p.grad.clone() for n, p in pipe.named_parameters()}
        logits = pipe.evaluate({"input_ids": IDS}, outputs="all").outputs["logits"]
        tokens = prompt()
        if replicas == 1:
            tokens = pipe.generate(tokens, max_new_tokens=NEW_TOKENS)
        return Trained(
            loss, gradients, logits, tokens, read, set(pipe.local_state_dict())
        )


def initialised(family: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Buffers that no state_dict has, and standard deviations of the other tensors."""
    with torch.device("meta"):
        model = model_of(Tokens(family))
    sample = {"input_ids": IDS[:2], "use_cache": False}
    with Pipeline(
        model, labelled, micro_batches=1, sample=sample, seed=0, **CALM
    ) as pipe:
        saved = pipe.local_state_dict()
        named = {n: p for layer in pipe.layers for n, p in layer.module.named_buffers()}
        return named, {name: one.std() for name, one in saved.items()}
