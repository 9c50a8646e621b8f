"""Checks of message fields against their type hints. Pure.

Looking at type hints costs more than all else of a message, so a check is made of each
once, when the messages are defined.
"""

from __future__ import annotations

import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Union

_BRIEFLY = reprlib.Repr()
_BRIEFLY.maxlist = _BRIEFLY.maxtuple = _BRIEFLY.maxdict = 20
_BRIEFLY.maxstring = _BRIEFLY.maxother = 400

Check = Callable[[Any], Any]
"""Gives a value as its hint says, lists as tuples; ValueError says what is wrong."""


def check_for(hint: Any) -> Check:
    """The check of a hint: bool, int, float, str, tuples of them, or None beside one.

    An int passes for a float and comes out as one.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        (one,) = (check_for(part) for part in parts if part is not type(None))
        return lambda value: None if value is None else one(value)
    if origin is tuple and parts[1:] == (Ellipsis,):
        return partial(_items, check_for(parts[0]))
    if origin is tuple:
        return partial(_row, [check_for(part) for part in parts])
    return _float if hint is float else partial(_exact, hint)


def brief(value: object) -> str:
    """A value for a message to people, however large and deep it is."""
    value = value[:80] if isinstance(value, (str, bytes)) else value
    text = _BRIEFLY.repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _items(check: Check, value: Any) -> tuple[Any, ...]:
    """Items of a tuple of any length, each checked alike."""
    return tuple(map(check, _sequence(value)))


def _row(checks: Sequence[Check], value: Any) -> tuple[Any, ...]:
    """One for each check."""
    if len(_sequence(value)) != len(checks):
        raise ValueError(f"expected {len(checks)} items, got {brief(value)}")
    return tuple(check(item) for check, item in zip(checks, value, strict=True))


def _sequence(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list, got {brief(value)}")
    return value


def _exact(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {brief(value)}")
    return value


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise ValueError(f"expected float, got {brief(value)}")
    return float(value)
