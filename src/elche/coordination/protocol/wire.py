"""Messages to and from plain msgpack values, with each field checked. Pure.

Reading type hints costs more than everything else for a message, so each hint is
compiled to a check once, at import.
"""

from __future__ import annotations

import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Union

from elche.coordination.protocol.events import Event, Interrupted, RankLost, Tick
from elche.coordination.protocol.instructions import Instruction
from elche.errors import ProtocolError

_BRIEFLY = reprlib.Repr()
_BRIEFLY.maxlist = _BRIEFLY.maxtuple = _BRIEFLY.maxdict = 20
_BRIEFLY.maxstring = _BRIEFLY.maxother = 400

Check = Callable[[Any], Any]
"""Converts a value to its hint's type, lists to tuples; raises ValueError."""


def check_for(hint: Any) -> Check:
    """Returns the check of a hint: bool, int, float, str, tuples of them, or optional.

    An int is accepted for a float, and converted.
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
    """Formats any value for an error message, shortened if large or deep."""
    value = value[:80] if isinstance(value, (str, bytes)) else value
    text = _BRIEFLY.repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _items(check: Check, value: Any) -> tuple[Any, ...]:
    """Checks a tuple of any length whose items have one type."""
    return tuple(map(check, _sequence(value)))


def _row(checks: Sequence[Check], value: Any) -> tuple[Any, ...]:
    """Checks a tuple with one check per item."""
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


FROM_WORKERS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in typing.get_args(Event)
    if kind not in (Interrupted, RankLost, Tick)
}
FROM_COORDINATOR: dict[str, type[Any]] = {
    kind.__name__: kind for kind in typing.get_args(Instruction)
}

_NAMES: dict[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in typing.get_args(Event | Instruction)
}
_CHECKS: dict[type[Any], dict[str, Check]] = {
    kind: {n: check_for(hint) for n, hint in typing.get_type_hints(kind).items()}
    for kind in _NAMES
}


def to_wire(message: Event | Instruction) -> dict[str, Any]:
    """Converts a message to plain values that msgpack supports."""
    kind = type(message)
    wire = {name: getattr(message, name) for name in _NAMES[kind]}
    wire["type"] = kind.__name__
    return wire


def from_wire(wire: object, known: dict[str, type[Any]]) -> Any:
    """Parses a message and checks every field.

    Args:
        wire: received value, as msgpack decoded it.
        known: message types that this sender may send, by name.

    Raises:
        ProtocolError: the value is no such message.
    """
    if not isinstance(wire, dict):
        raise ProtocolError(f"expected a mapping, got {type(wire).__name__}")
    kind = known.get(str(wire.get("type")))
    if kind is None:
        raise ProtocolError(f"unknown message type {brief(wire.get('type'))}")
    checks = _CHECKS[kind]
    if len(wire) != len(checks) + 1 or not wire.keys() >= checks.keys():
        raise ProtocolError(
            f"{kind.__name__}: expected fields {sorted(checks)}, got "
            f"{brief(sorted(map(str, wire)))}"
        )
    values = {}
    for name, check in checks.items():
        try:
            values[name] = check(wire[name])
        except ValueError as error:
            raise ProtocolError(f"{kind.__name__}.{name}: {error}") from None
    return kind(**values)
