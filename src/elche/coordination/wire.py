"""Messages as plain values that msgpack carries, and back, each field checked. Pure."""

from __future__ import annotations

import types
import typing
from dataclasses import fields
from typing import Any, Union

from elche.coordination.messages import Disconnected, Event, Instruction, Tick
from elche.errors import ProtocolError

FROM_WORKERS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in typing.get_args(Event)
    if kind not in (Disconnected, Tick)
}
FROM_COORDINATOR: dict[str, type[Any]] = {
    kind.__name__: kind for kind in typing.get_args(Instruction)
}

_HINTS: dict[str, dict[str, Any]] = {
    name: typing.get_type_hints(kind)
    for name, kind in (*FROM_WORKERS.items(), *FROM_COORDINATOR.items())
}


def to_wire(message: Event | Instruction) -> dict[str, Any]:
    """A message as plain values that msgpack carries."""
    wire = {field.name: getattr(message, field.name) for field in fields(message)}
    wire["type"] = type(message).__name__
    return wire


def from_wire(wire: object, known: dict[str, type[Any]]) -> Any:
    """Reads a message and checks every field.

    Args:
        wire: what came, as msgpack gave it.
        known: the types that may come from that side, by name.

    Raises:
        ProtocolError: it is not such a message.
    """
    if not isinstance(wire, dict):
        raise ProtocolError(f"expected a mapping, got {type(wire).__name__}")
    kind = known.get(str(wire.get("type")))
    if kind is None:
        raise ProtocolError(f"unknown message type {_brief(wire.get('type'))}")
    hints = _HINTS[kind.__name__]
    if set(wire) - {"type"} != set(hints):
        raise ProtocolError(
            f"{kind.__name__}: expected fields {sorted(hints)}, got "
            f"{_brief(sorted(map(str, wire)))}"
        )
    values = {
        name: _checked(f"{kind.__name__}.{name}", wire[name], hint)
        for name, hint in hints.items()
    }
    return kind(**values)


def _checked(where: str, value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` says, lists read as tuples."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        rest = [option for option in options if option is not type(None)]
        return _checked(where, value, rest[0])
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ProtocolError(f"{where}: expected a list, got {_brief(value)}")
        parts = typing.get_args(hint)
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(_checked(where, item, parts[0]) for item in value)
        if len(value) != len(parts):
            raise ProtocolError(
                f"{where}: expected {len(parts)} items, got {_brief(value)}"
            )
        return tuple(
            _checked(where, item, part) for item, part in zip(value, parts, strict=True)
        )
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ProtocolError(f"{where}: expected {hint.__name__}, got {_brief(value)}")
    return value


def _brief(value: object) -> str:
    """A value for a message to people, however large it is."""
    text = repr(value) if not isinstance(value, (str, bytes)) else repr(value[:80])
    return text if len(text) <= 100 else text[:97] + "..."
