"""Generation of tokens with a causal model in stages.

With caches of keys and values, each token sends only the new position through the
stages; without caches, the whole sequence.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from elche.config_checks import check_whole
from elche.errors import ConfigError
from elche.pipeline.stage import LayerCaches
from elche.pipeline.step.inputs import Call
from elche.pipeline.step.stepping import Stepping
from elche.pipeline.trees import as_tensors, flatten, map_tensors

Choose = Callable[[torch.Tensor], torch.Tensor]
BatchOf = Callable[[torch.Tensor], Any]
PROVEN_AFTER = 3
"""Number of checked tokens: after the prompt, after a cached prompt, and once more."""
WHOLE_ARGUMENT = "attention_mask"
"""Argument of the model that includes the cached positions."""

logger = logging.getLogger(__name__)


@final
@dataclass
class Generation:
    """A generation in progress; see `elche.pipeline.Pipeline.generate`.

    Args:
        stepping: runs the stages.
    """

    stepping: Stepping
    tokens: Any
    max_new_tokens: int
    end_token: int | None
    choose: Choose
    batch_of: BatchOf
    use_cache: bool

    def __post_init__(self) -> None:
        self._communicator = self.stepping.communicator
        self._variants = self.stepping.variants
        self._caches: LayerCaches | None = None
        self._cached_positions = self._compared = 0
        self._form = ""
        self._fixed: set[int] = set()

    def run(self) -> torch.Tensor:
        """Appends tokens to the tokens of the first stage's rank; call on all ranks."""
        if self.stepping.groups.are_several:
            raise ConfigError(
                "generate does not support replicas; load this pipeline's "
                "state_dict into a Pipeline without replicas"
            )
        made, end_token = self._begin(), self.end_token
        ended = torch.zeros(len(made), dtype=torch.bool, device="cpu")
        try:
            for _ in range(self.max_new_tokens):
                following = self._next(made)
                if end_token is not None:
                    following[ended] = end_token
                    ended |= following == end_token
                made = torch.cat([made, following[:, None]], 1)
                if bool(ended.all()):
                    break
        finally:
            if self._caches is not None:
                self._caches.clear()  # a traceback may keep them alive
        return made

    def _begin(self) -> torch.Tensor:
        """Agrees on the settings with all ranks; returns the tokens to continue."""
        first = self.stepping.parts.plan.schedule.placement[0]

        def prompt() -> list[Any]:
            most, use_cache = self.max_new_tokens, bool(self.use_cache)
            check_whole("max_new_tokens", most, 0)
            settings = [most, self.end_token, use_cache]
            if self._communicator.rank != first:
                return [settings]
            listed = _listed(self.tokens)
            batch = self._batch(_tokens(listed))
            _, form = flatten(batch, "the batch")
            omitted = self.stepping.parts.omitted_by(batch, {})
            return [settings, listed, str(form), omitted]

        reports = self._communicator.agree(prompt, "generate")
        settings = [one[0] for one in reports]
        if any(one != settings[0] for one in settings):
            raise ConfigError(
                "expected one max_new_tokens, end_token and use_cache on all ranks, "
                f"got {settings} by rank"
            )
        _, listed, self._form, omitted = reports[first]
        if self.use_cache and not self._variants.refused:
            offers = self._communicator.agree(
                lambda: list(self._variants.offer(omitted)), "the layers' caches"
            )
            fault = next((text for _, text in offers if text), "")
            has_cache = any(one for one, _ in offers)
            self._refuse(fault or ("" if has_cache else "no layer takes cache="))
            if not self._variants.refused:
                self._caches = {}
        return _tokens(listed)

    def _refuse(self, reason: str) -> None:
        """Disables caches from now on if `reason` is not empty; logs it once."""
        if reason and not self._variants.refused:
            self._variants.refused = reason
            if self.stepping.parts.is_first:
                logger.warning(
                    "generate runs the whole sequence again for each token: %s (see "
                    "Pipeline.generate)",
                    reason,
                )

    def _batch(self, tokens: torch.Tensor) -> Any:
        return as_tensors(self.batch_of(tokens), "what batch_of returns")

    def _next(self, made: torch.Tensor) -> torch.Tensor:
        """Chooses the next token of each sequence, on every rank."""
        outputs = self._outputs(made)

        def choose() -> list[int] | None:
            if not self.stepping.parts.is_last:
                return None
            reports = self.choose(_last_logits(outputs))
            chosen = torch.as_tensor(reports, device="cpu")
            if chosen.shape != (len(made),):
                raise ConfigError(
                    f"expected choose to return one token for each of {len(made)} "
                    f"sequences, got shape {list(chosen.shape)}"
                )
            return [int(one) for one in chosen]

        reports = self._communicator.agree(choose, "the choice of a token")
        last = self.stepping.parts.plan.schedule.placement[-1]
        return _tokens(reports[last])

    def _outputs(self, made: torch.Tensor) -> Any:
        """The model's output for the sequences, on the rank of the last stage."""
        call = Call("generate", outputs="last", make_batch=lambda: self._batch(made))
        if self._caches is None:
            return self.stepping.evaluate(call).outputs
        done = self._cached_positions

        def behind() -> Any:
            return _behind(self._batch(made), made.shape, done, self._fixed)

        of_new = replace(call, make_batch=behind)
        found = self.stepping.evaluate(of_new, self._caches).outputs
        self._cached_positions = made.shape[1]
        if self._form in self._variants.proven:
            return found
        return self._prove(found, self.stepping.evaluate(call).outputs)

    def _prove(self, found: Any, wanted: Any) -> Any:
        """Compares cached logits with those of an uncached run; returns the latter.

        Two faults would otherwise change tokens silently: a layer that mixes positions
        without a cache, and positions counted from the first new token.
        """

        def compare() -> str:
            if not self.stepping.parts.is_last:
                return ""
            logits = _last_logits(wanted)
            apart = _distance(_last_logits(found), logits)
            if apart <= torch.finfo(logits.dtype).eps ** 0.4:  # rounding error
                return ""
            return f"its layers' caches change the logits (by {apart:.1e})"

        reports = self._communicator.agree(compare, "the check of the caches")
        self._refuse("".join(reports))
        self._compared += 1
        if self._variants.refused:
            self._caches = None
        elif self._compared == PROVEN_AFTER:
            self._variants.proven.add(self._form)
        return wanted


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Most likely token of each sequence."""
    return logits.argmax(-1)


def _behind(batch: Any, shape: Sequence[int], done: int, fixed: set[int]) -> Any:
    """A model's input for the new positions only, after `done` cached ones."""
    places = itertools.count()

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        place = next(places)
        if tensor.shape[:2] != shape:
            fixed.add(place)  # never cut, even if tokens reach this length
        return tensor if place in fixed else tensor[:, done:]

    if isinstance(batch, dict):
        return {
            name: one if name == WHOLE_ARGUMENT else map_tensors(one, cut)
            for name, one in batch.items()
        }
    return map_tensors(batch, cut)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Distance of logits, relative to `wanted`; -inf in both counts as equal."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    is_ruled_out = torch.isneginf(found) & torch.isneginf(wanted)
    found, wanted = (one.masked_fill(is_ruled_out, 0.0) for one in (found, wanted))
    apart = (found - wanted).norm() / wanted.norm().clamp_min(1e-300)
    return float(apart)


def _tokens(listed: Any) -> torch.Tensor:
    return torch.tensor(listed, dtype=torch.int64, device="cpu")


def _listed(tokens: Any) -> list[list[int]]:
    found = torch.as_tensor(() if tokens is None else tokens, device="cpu")
    if found.dim() != 2 or not found.numel() or found.is_floating_point():
        raise ConfigError(
            "expected tokens [sequences, length] of whole numbers, one at least, on "
            f"the rank of the first stage, got {found.dtype} {list(found.shape)}"
        )
    listed: list[list[int]] = found.tolist()
    return listed


def _last_logits(outputs: Any) -> torch.Tensor:
    """Logits of the last position [sequences, vocabulary]."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    elif isinstance(outputs, (tuple, list)):
        found = outputs[0]
    if not isinstance(found, torch.Tensor) or found.dim() != 3:
        is_tensor = isinstance(found, torch.Tensor)
        shown = f"shape {list(found.shape)}" if is_tensor else type(outputs).__name__
        raise ConfigError(
            "generate needs logits [sequences, length, vocabulary] as the model's "
            f"output, its first value, or its 'logits', got {shown}"
        )
    return found[:, -1]
