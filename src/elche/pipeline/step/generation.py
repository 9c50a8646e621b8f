"""Generation of tokens with a causal model in stages.

Each token runs the whole sequence again: there is no cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from elche.errors import ConfigError
from elche.pipeline.peers.communicator import PipelineCommunicator
from elche.pipeline.step.inputs import Call
from elche.pipeline.step.stepping import Stepping

Choose = Callable[[torch.Tensor], torch.Tensor]
BatchOf = Callable[[torch.Tensor], Any]


@final
class Generation:
    """Generation under way; see `elche.pipeline.Pipeline.generate`.

    Args:
        stepping: runs the stages.
        communicator: all ranks.
        batch_of: the model's input for some tokens.
        choose: the next tokens of their logits.
    """

    def __init__(
        self,
        stepping: Stepping,
        communicator: PipelineCommunicator,
        batch_of: BatchOf,
        choose: Choose,
    ) -> None:
        self._stepping = stepping
        self._communicator = communicator
        self._batch_of = batch_of
        self._choose = choose

    def run(self, tokens: Any, most: int, end_token: int | None) -> torch.Tensor:
        """Appends tokens to those of the first stage's rank; with all ranks.

        Args:
            tokens: of that rank.
            most: how many to append.
            end_token: ends a sequence, which is filled up with it.
        """
        if self._stepping.has_replicas:
            raise ConfigError(
                "generate runs one pipeline, and this one has replicas; load its "
                "state_dict into a Pipeline without them"
            )
        placement = self._stepping.parts.plan.schedule.placement
        is_first = self._communicator.rank == placement[0]

        def prompt() -> list[Any]:
            if not isinstance(most, int) or most < 0:
                raise ConfigError(
                    f"expected max_new_tokens of at least 0, got {most!r}"
                )
            return [most, end_token, _listed(tokens) if is_first else None]

        told = self._communicator.agree(prompt, "generate")
        if any(one[:2] != told[0][:2] for one in told):
            raise ConfigError(
                "expected one max_new_tokens and end_token on all ranks, got "
                f"{[one[:2] for one in told]} by rank"
            )
        made = torch.tensor(told[placement[0]][2], dtype=torch.int64, device="cpu")
        ended = torch.zeros(len(made), dtype=torch.bool, device="cpu")
        for _ in range(most):
            following = self._next(made)
            if end_token is not None:
                following[ended] = end_token
                ended |= following == end_token
            made = torch.cat([made, following[:, None]], 1)
            if bool(ended.all()):
                break
        return made

    def _next(self, made: torch.Tensor) -> torch.Tensor:
        """The next token of each sequence, on every rank."""
        seat = self._stepping.seat
        call = Call(what="generate", batch=made)
        if seat.is_first:
            call = Call(what="generate", batch=self._batch_of(made))
        outputs = self._stepping.evaluate(call).outputs

        def choose() -> list[int] | None:
            if not seat.is_last:
                return None
            told = self._choose(_last_logits(outputs))
            chosen = torch.as_tensor(told, device="cpu")
            if chosen.shape != (len(made),):
                raise ConfigError(
                    f"expected choose to return one token for each of {len(made)} "
                    f"sequences, got shape {list(chosen.shape)}"
                )
            return [int(one) for one in chosen]

        told = self._communicator.agree(choose, "the choice of a token")
        last = self._stepping.parts.plan.schedule.placement[-1]
        return torch.tensor(told[last], dtype=torch.int64, device="cpu")


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each sequence."""
    return logits.argmax(-1)


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
        raise ConfigError(
            "generate needs logits [sequences, length, vocabulary] as the model's "
            "output, its first value, or its 'logits', got "
            + (
                f"shape {list(found.shape)}"
                if isinstance(found, torch.Tensor)
                else f"{type(outputs).__name__}"
            )
        )
    return found[:, -1]
