"""What a batch weighs in means over ranks, where the user says it: tokens, say."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, final

import torch

from elche.errors import ConfigError

WeightOf = Callable[[Any], float | torch.Tensor]
"""Called with a batch, or with a part of its samples; see `elche.setup`."""

LEAST, MOST = 1e-9, 1e15
"""Positive weights: their sums, and their ratios, are exact enough in any precision."""


@final
class BatchWeights:
    """Asks the user's function, and refuses what is no weight.

    Args:
        weight_of: the user's function.
        rank: this rank.
    """

    def __init__(self, weight_of: WeightOf, rank: int) -> None:
        if not callable(weight_of):
            raise ConfigError(
                "expected weight_of to be a function of a batch that returns what it "
                f"weighs, got {weight_of!r}"
            )
        self._weight_of = weight_of
        self._rank = rank

    def of(self, data: Any, where: str) -> float:
        """The weight of a batch; waits for the device if it is computed there.

        Args:
            data: the batch.
            where: names it, as in ``batch 3 of epoch 0``.

        Raises:
            ConfigError: it is none.
            Whatever the user's function raises.
        """
        said = self._weight_of(data)
        weight = _number(said)
        if weight is None or not (weight == 0.0 or LEAST <= weight <= MOST):
            raise ConfigError(
                f"rank {self._rank}: weight_of gave {_shown(said)} for {where}; "
                f"expected one number, 0 or from {LEAST:g} to {MOST:g}"
            )
        return weight


def _number(said: Any) -> float | None:
    if isinstance(said, torch.Tensor):
        return float(said) if said.numel() == 1 and not said.is_complex() else None
    return float(said) if isinstance(said, numbers.Real) else None


def _shown(said: Any) -> str:
    if isinstance(said, torch.Tensor) and said.numel() != 1:
        return f"a tensor of shape {list(said.shape)}"
    return repr(said)
