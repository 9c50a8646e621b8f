"""Copies of torch's functions that let the operations inside them be seen.

Functions of torch.nn.functional hand themselves over as a whole when an argument has a
type of its own; a copy looks away and goes on, so that its linear layers are found.
"""

from __future__ import annotations

import types
from typing import Any


def _nothing_overrides(*_: Any) -> bool:
    return False


def seen_through(function: Any, **replaced: Any) -> Any:
    """A copy of a function that sees no arguments with types of their own.

    Args:
        function: written in Python.
        replaced: global names of its module that the copy sees otherwise.
    """
    inside = {
        **function.__globals__, "has_torch_function": _nothing_overrides, **replaced
    }  # fmt: skip
    made = types.FunctionType(
        function.__code__, inside, function.__name__, function.__defaults__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
