"""Sixteen models of transformers with tiny random configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from elche.errors import ConfigError, RemoteRankError
from elche.pipeline.pipeline import Pipeline
from tests.pipeline.cases.pipeline_cases import CALM

WORDS, LENGTH, SAMPLES, NEW_TOKENS = 29, 6, 8, 5
_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
_TEXT = {
    **_SMALL,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_BERT = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER_DECODER = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": WORDS,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_IMAGE = {**_SMALL, "image_size": 8, "patch_size": 4}


@dataclass(frozen=True)
class Family:
    """A model of transformers, its input, and how exactly it computes.

    Attributes:
        build: makes the model.
        inputs: makes the input of a number of samples.
        words: classes of the target, a target for each output row.
        tolerance: relative error; above 2e-12 the model itself computes in float32.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, torch.Tensor]]
    words: int = WORDS
    tolerance: float = 2e-12

    def model(self) -> nn.Module:
        """The model in float64, with the same weights each time."""
        torch.manual_seed(3)
        return self.build().double().train()

    def batch(self, seed: int, samples: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return self.inputs(samples)


def tokens(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (samples, LENGTH))}


def masked(samples: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(samples, LENGTH, dtype=torch.int64)
    mask[::2, -2:] = 0
    return {**tokens(samples), "attention_mask": mask}


def pairs(samples: int) -> dict[str, torch.Tensor]:
    decoder = torch.randint(3, WORDS, (samples, LENGTH - 1))
    return {**masked(samples), "decoder_input_ids": decoder}


def sounds(samples: int) -> dict[str, torch.Tensor]:
    decoder = torch.randint(3, WORDS, (samples, LENGTH))
    features = torch.randn(samples, 8, 16, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": decoder}


def images(samples: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 8, 8, dtype=torch.float64)}


def captions(samples: int) -> dict[str, torch.Tensor]:
    return {**tokens(samples), **images(samples)}


def _clip() -> nn.Module:
    text = {**_TEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = hf.CLIPConfig(text_config=text, vision_config=_IMAGE, projection_dim=8)
    return hf.CLIPModel(config)


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # others have no float64
    return hf.MixtralForCausalLM(config)


def _whisper() -> nn.Module:
    sizes = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**_ENCODER_DECODER, **sizes, init_std=0.3)
    )


FAMILIES: dict[str, Family] = {
    "Llama": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)), masked),
    "Qwen3": Family(
        lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=4)), masked
    ),
    "Mistral": Family(
        lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED, sliding_window=3)),
        tokens,
    ),
    "Mixtral": Family(_mixtral, tokens),
    "Gemma 3": Family(
        lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**_GROUPED, head_dim=4, sliding_window=3)
        ),
        tokens,
        tolerance=1e-5,
    ),
    "GPT-2": Family(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                **{**_TEXT, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
            )
        ),
        masked,
    ),
    "BERT": Family(lambda: hf.BertForMaskedLM(hf.BertConfig(**_BERT)), masked),
    "RoBERTa": Family(
        lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**{**_BERT, "pad_token_id": 0})),
        masked,
    ),
    "T5": Family(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=WORDS,
                d_model=16,
                d_kv=4,
                d_ff=24,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
        pairs,
    ),
    "BART": Family(
        lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(**_ENCODER_DECODER, max_position_embeddings=32, init_std=0.3)
        ),
        pairs,
    ),
    "Whisper": Family(_whisper, sounds),
    "ViT": Family(
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(**_IMAGE, hidden_dropout_prob=0.0)
        ),
        images,
        words=2,
    ),
    "CLIP": Family(_clip, captions, words=8),
    "Phi": Family(
        lambda: hf.PhiForCausalLM(
            hf.PhiConfig(**_TEXT, resid_pdrop=0.0, embd_pdrop=0.0)
        ),
        masked,
    ),
    "OLMo": Family(lambda: hf.OlmoForCausalLM(hf.OlmoConfig(**_GROUPED)), masked),
    "Mamba": Family(
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(
                vocab_size=WORDS,
                hidden_size=16,
                state_size=4,
                num_hidden_layers=4,
                time_step_rank=2,
                initializer_range=0.3,
            )
        ),
        tokens,
        tolerance=1e-5,
    ),
}


@dataclass
class Ran:
    """What came out on a rank.

    Attributes:
        refused: why the model was refused; "" if it ran.
        layers: number of layers of the cut.
        loss: of the batch, in training.
        evaluated: loss in evaluation.
        gradients: gradients by parameter name, of this rank's parameters.
        tokens: chosen by generate, of models that have it.
    """

    refused: str = ""
    layers: int = 0
    loss: float = 0.0
    evaluated: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: torch.Tensor | None = None


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the logits; for CLIP, of the product of its embeddings."""
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = output.image_embeds * output.text_embeds
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _target(family: Family, samples: int) -> torch.Tensor:
    with torch.no_grad():
        found = family.model()(**family.batch(2, samples))
    logits = found.logits if hasattr(found, "logits") else found.image_embeds
    torch.manual_seed(4)
    return torch.randint(family.words, logits.shape[:-1])


def _prompt(model: Any, batch: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Name of the tokens that generate continues, and the input without masks."""
    name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    whole = {one: value for one, value in batch.items() if "attention" not in one}
    given = {one: value[:2].clone() for one, value in whole.items()}
    if name != "input_ids":  # transformers would put it before the others
        given[name][:, 0] = model.config.decoder_start_token_id
    return name, given


def alone(name: str, folder: Path | None = None) -> Ran:
    """A batch in one process, without micro-batches.

    Args:
        name: of the family.
        folder: takes the weights, where given.
    """
    family = FAMILIES[name]
    model, batch = family.model(), family.batch(2, SAMPLES)
    if folder is not None:
        model.save_pretrained(folder, save_original_format=False)
    target = _target(family, SAMPLES)
    loss = loss_of(model(**batch), target)
    loss.backward()
    gradients = {
        own: torch.zeros_like(one) if one.grad is None else one.grad
        for own, one in model.named_parameters()
    }
    with torch.no_grad():
        evaluated = loss_of(model.eval()(**batch), target).item()
    tokens = None
    if model.can_generate():
        _, given = _prompt(model, batch)
        model.generation_config = hf.GenerationConfig(  # no token is forced
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            decoder_start_token_id=getattr(model.config, "decoder_start_token_id", 0),
        )
        # Whisper's own also cuts sounds and chooses a language.
        generate: Any = hf.GenerationMixin.generate
        tokens = generate(model, **given)
        tokens = tokens[:, -NEW_TOKENS:]
    return Ran("", 0, loss.item(), evaluated, gradients, tokens)


def piped(
    name: str, schedule: str, folder: Path | None = None, generates: bool = False
) -> Ran:
    """The same on a rank of a pipeline, with four micro-batches.

    Args:
        name: of the family.
        schedule: of the pipeline.
        folder: weights of the model, which is built on the meta device then.
        generates: continues two sequences, too.
    """
    family = FAMILIES[name]
    batch = family.batch(2, SAMPLES)
    with torch.device("cpu" if folder is None else "meta"):
        model = family.model()
    config: Any = model.config
    fixed = {"use_cache": False} if hasattr(config, "use_cache") else {}
    try:
        with Pipeline(
            model,
            loss_of,
            micro_batches=4,
            schedule=schedule,
            sample={**fixed, **family.batch(1, 2)},
            init=None if folder is None else "load",
            **CALM,
        ) as pipe:
            if folder is not None:
                pipe.load(folder)
            target = _target(family, SAMPLES)
            loss = pipe.step(batch, target).loss
            gradients = {
                own: torch.zeros_like(one) if one.grad is None else one.grad
                for own, one in pipe.named_parameters()
            }
            evaluated = pipe.evaluate(batch, target).loss
            assert loss is not None
            assert evaluated is not None
            found = Ran("", sum(pipe.partition), loss, evaluated, gradients)
            if generates:
                key, given = _prompt(model, batch)
                found.tokens = pipe.generate(
                    given[key],
                    max_new_tokens=NEW_TOKENS,
                    batch_of=lambda tokens: {**given, key: tokens},
                )[:, -NEW_TOKENS:]
            return found
    except (ConfigError, RemoteRankError) as error:
        return Ran(refused=str(error))


def worst_error(found: list[Ran], expected: Ran) -> float:
    """Largest relative error of losses and gradients over all ranks."""
    assert {name for one in found for name in one.gradients} == set(expected.gradients)
    errors = [
        abs(one.loss / expected.loss - 1) + abs(one.evaluated / expected.evaluated - 1)
        for one in found
    ]
    scale = max(one.norm().item() for one in expected.gradients.values())
    for one in found:
        for name, gradient in one.gradients.items():
            wanted = expected.gradients[name]
            norm = max(wanted.norm().item(), 1e-3 * scale)
            errors.append((gradient - wanted).norm().item() / norm)
    return torch.tensor(errors).max().item()  # NaN if one is
