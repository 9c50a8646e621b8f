"""Messages as plain values that msgpack carries, and back, each field checked. Pure."""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any

from elche.coordination.protocol.events import Event, Interrupted, RankLost, Tick
from elche.coordination.protocol.field_checks import Check, brief, check_for
from elche.coordination.protocol.instructions import Instruction
from elche.errors import ProtocolError

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
    """A message as plain values that msgpack carries."""
    kind = type(message)
    wire = {name: getattr(message, name) for name in _NAMES[kind]}
    wire["type"] = kind.__name__
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
