"""Values that two objects of equal state have in common, to tell states apart by.

Of generators too: by where they are suspended, and by their local variables, so loops
over a yield must have a variable that says where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from types import FunctionType, GeneratorType, MethodType
from typing import Any

ATOMS = (int, float, str, bytes, type(None), type, Enum, FunctionType, range)


class Freezer:
    """Makes one value of an object and all that it refers to.

    Args:
        tokens: what stands for certain objects, by their ``id``.
        left_out: (class, attribute) of what says nothing of the state.
    """

    def __init__(
        self,
        tokens: Mapping[int, Any] | None = None,
        left_out: Collection[tuple[type, str]] = (),
    ) -> None:
        self._tokens = tokens or {}
        self._left_out = frozenset(left_out)
        self._seen: dict[int, int] = {}

    def freeze(self, value: Any) -> Any:
        """A hashable value."""
        if isinstance(value, ATOMS):
            return value
        if (token := self._tokens.get(id(value))) is not None:
            return token
        kind, freeze = type(value), self.freeze
        if isinstance(value, (tuple, list, deque)):
            return kind.__name__, *map(freeze, value)
        if isinstance(value, (set, frozenset)):
            return "set", frozenset(map(freeze, value))
        if isinstance(value, dict):
            items = value.items()
            return kind.__name__, *((freeze(key), freeze(one)) for key, one in items)
        if is_frozen(kind):
            with suppress(TypeError):  # of a dictionary
                hash(value)
                return value
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, MethodType):
            return value.__qualname__, freeze(value.__self__)
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            inside = None if frame is None else (frame.f_lasti, {**frame.f_locals})
            return value.__qualname__, freeze(inside), freeze(value.gi_yieldfrom)
        if not hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
            raise TypeError(f"states of a {kind.__name__} cannot be told apart")
        return kind.__name__, *(
            (name, freeze(one))
            for name, one in attributes(value)
            if (kind, name) not in self._left_out
        )


@lru_cache(None)
def is_frozen(kind: type) -> bool:
    """Whether objects of a class are equal where their fields are, and hashable."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen and parameters.eq


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of all that an object holds."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
