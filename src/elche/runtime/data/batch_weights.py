"""User-defined batch weights in means over ranks: tokens, say."""

from __future__ import annotations

import inspect
import logging
import numbers
from collections.abc import Callable
from typing import Any, final

import torch

from elche.errors import ConfigError

WeightOf = Callable[[Any], float | torch.Tensor]
"""Called with a batch, or with a part of its samples; see `elche.setup`."""

LEAST, MOST = 1e-9, 1e15
"""Positive weights: their sums, and their ratios, are exact enough in any precision."""

SILENT_BATCHES = 20
"""Leading batches of weight 0 after which a warning is logged."""

_log = logging.getLogger(__name__)


@final
class BatchWeights:
    """Asks the user's function, and refuses what is no weight.

    Args:
        weight_of: the user's function.
        rank: this rank.

    Raises:
        ConfigError: it cannot be called with a batch.
    """

    def __init__(self, weight_of: WeightOf, rank: int) -> None:
        check_weight_of(weight_of)
        self._weight_of = weight_of
        self._rank = rank
        self._silent = 0

    def of(self, data: Any, where: str) -> float:
        """The weight of a batch; waits for the device if it is computed there.

        Args:
            data: the batch.
            where: names it, as in ``batch 3 of epoch 0``.

        Raises:
            ConfigError: it is none, or the user's function failed.
        """
        try:
            said = self._weight_of(data)
            weight = _number(said)
        except Exception as error:
            raise ConfigError(
                f"rank {self._rank}: weight_of failed for {where}, which is "
                f"{_described(data)}: {type(error).__name__}: {error}; expected a "
                "function of a batch as the loader makes it"
            ) from error
        if weight is None or not (weight == 0.0 or LEAST <= weight <= MOST):
            raise ConfigError(
                f"rank {self._rank}: weight_of gave {_shown(said)} for {where}; "
                f"expected one number, 0 or from {LEAST:g} to {MOST:g}"
            )
        if self._silent >= 0:
            self._count_silent(weight)
        return weight

    def _count_silent(self, weight: float) -> None:
        """Until the first batch that counts, if there is one."""
        self._silent = -1 if weight else self._silent + 1
        if self._silent == SILENT_BATCHES:
            self._silent = -1
            _log.warning(
                "rank %d: weight_of gave 0 for all of the first %d batches, which "
                "count nowhere: nothing is learned from them; if that is not what the "
                "data say, look at the function",
                self._rank,
                SILENT_BATCHES,
            )


def check_weight_of(weight_of: object) -> None:
    """Refuses what cannot be called with a batch.

    Raises:
        ConfigError: it is no function, or not one of a single argument.
    """
    if not callable(weight_of):
        raise ConfigError(
            "expected weight_of to be a function of a batch that returns what it "
            f"weighs, got {weight_of!r}"
        )
    try:
        signature = inspect.signature(weight_of)
    except (TypeError, ValueError):
        return  # of a builtin, say: the first batch will show
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            "expected weight_of to be a function of a batch alone, got one whose "
            f"arguments are {signature}: {error}"
        ) from None


def _number(said: Any) -> float | None:
    """Value of one number of Python, torch or numpy."""
    if isinstance(said, torch.Tensor):
        return float(said.detach()) if _is_real_scalar(said) else None
    if getattr(said, "size", None) == 1 and hasattr(said, "dtype"):
        said = said.item()  # of numpy
    return float(said) if isinstance(said, numbers.Real) else None


def _is_real_scalar(said: torch.Tensor) -> bool:
    return said.numel() == 1 and not said.is_complex()


def _shown(said: Any) -> str:
    shape = getattr(said, "shape", None)
    if shape is not None and getattr(said, "size", 1) != 1 and list(shape):
        kind = "a tensor" if isinstance(said, torch.Tensor) else "an array"
        return f"{kind} of shape {list(shape)}"
    return repr(said)


def _described(data: Any) -> str:
    """Structure of a batch, for an error message."""
    if isinstance(data, torch.Tensor):
        return f"a tensor of shape {list(data.shape)}"
    if isinstance(data, dict):
        return f"a dict of {', '.join(map(repr, data))}"
    if isinstance(data, (list, tuple)):
        kinds = ", ".join(type(each).__name__ for each in data)
        return f"a {type(data).__name__} of {kinds}"
    return f"of type {type(data).__name__}"
