"""User-defined batch weights (tokens, say) in means over ranks."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any, final

import torch

from elche.errors import ConfigError

WeightOf = Callable[[Any], float | torch.Tensor]
"""Called with a batch, or with a part of its samples; see `elche.setup`."""

LEAST, MOST = 1e-9, 1e15
"""Range of positive weights, whose sums and ratios are exact in any precision."""


@final
class BatchWeights:
    """Calls the user's weight function, and refuses invalid results.

    Args:
        weight_of: the user's function.
        rank: this rank.

    Raises:
        ConfigError: the function cannot be called with a batch.
    """

    def __init__(self, weight_of: WeightOf, rank: int) -> None:
        check_weight_of(weight_of)
        self._weight_of = weight_of
        self._rank = rank

    def of(self, data: Any, where: str) -> float:
        """The weight of a batch; waits for the device if it is computed there.

        Args:
            data: the batch.
            where: name of the batch, as in ``batch 3 of epoch 0``.

        Raises:
            ConfigError: the weight is invalid, or the user's function failed.
        """
        try:
            value = self._weight_of(data)
            weight = _number(value)
        except Exception as error:
            raise ConfigError(
                f"rank {self._rank}: weight_of failed for {where}, which is "
                f"{_described(data)}: {type(error).__name__}: {error}; expected a "
                "function of a batch as the loader makes it"
            ) from error
        if weight is None or not (weight == 0.0 or LEAST <= weight <= MOST):
            raise ConfigError(
                f"rank {self._rank}: weight_of gave {_shown(value)} for {where}; "
                f"expected one number, 0 or from {LEAST:g} to {MOST:g}"
            )
        return weight


def check_weight_of(weight_of: object) -> None:
    """Refuses anything but a function of one batch.

    Raises:
        ConfigError: it is no function, or takes another number of arguments.
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


def _number(value: Any) -> float | None:
    """Converts one real number of Python, torch or numpy; None for other values."""
    if isinstance(value, torch.Tensor):
        is_real = value.numel() == 1 and not value.is_complex()
        return float(value.detach()) if is_real else None
    if getattr(value, "size", None) == 1 and hasattr(value, "dtype"):
        value = value.item()  # of numpy
    return float(value) if isinstance(value, numbers.Real) else None


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape and getattr(value, "size", 1) != 1:
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
        return f"{kind} of shape {list(shape)}"
    return repr(value)


def _described(data: Any) -> str:
    """Structure of a batch, for an error message."""
    if isinstance(data, dict):
        return f"a dict of {', '.join(map(repr, data))}"
    if isinstance(data, (list, tuple)):
        kinds = ", ".join(type(each).__name__ for each in data)
        return f"a {type(data).__name__} of {kinds}"
    return f"of type {type(data).__name__}"
