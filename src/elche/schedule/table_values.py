"""Checked values of a TOML table. Pure.

Every error message begins with the table, so that a file can be corrected without
reading code.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from elche.config_checks import is_number
from elche.errors import ConfigError

Table = TypeVar("Table")

_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "float": ("a number", (int, float)),
    "int": ("a whole number", (int,)),
    "str": ("a string", (str,)),
    "bool": ("true or false", (bool,)),
}


def read_table(
    kind: type[Table],
    where: str,
    raw: object,
    *,
    also: Set[str] = frozenset(),
    hidden: Set[str] = frozenset(),
    **given: Any,
) -> Table:
    """Builds a dataclass from a table with its fields.

    Args:
        kind: the dataclass; fields in the table are numbers, strings or booleans.
        where: name of the table, for messages.
        raw: the table as parsed from TOML.
        also: further keys of the table, which the caller reads.
        hidden: fields that a table must not set.
        given: fields that the caller sets, which override the table.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: expected a table, got {raw!r}")
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    check_keys(raw, (known.keys() - hidden) | also, where)
    values = {key: raw[key] for key in raw if key not in also and key not in given}
    for key, value in values.items():
        words = str(known[key].type).split(" | ")
        expected, types = next(_KINDS[word] for word in words if word in _KINDS)
        if not isinstance(value, types) or isinstance(value, bool) != (bool in types):
            raise ConfigError(f"{where}: expected {expected} for {key}, got {value!r}")
    for key, item in known.items():
        needed = item.default is MISSING and item.default_factory is MISSING
        if needed and key not in values and key not in given:
            raise ConfigError(f"{where}: the key {key!r} is missing")
    try:
        return kind(**values, **given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def whole(table: Mapping[str, Any], key: str, where: str, default: int = 1) -> int:
    """Reads an integer of at least 1; raises ConfigError for other values."""
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{where}: expected a whole number of at least 1 for {key}, got {value!r}"
        )
    return value


def three_times(raw: object, where: str, key: str) -> tuple[float, float, float]:
    """Reads the times of F, I and W; raises ConfigError for other values."""
    parts = tuple(raw) if isinstance(raw, list | tuple) else ()
    if len(parts) != 3 or not all(map(is_number, parts)):
        raise ConfigError(f"{where}: expected {key} = [F, I, W], got {raw!r}")
    return parts


def tables(raw: Mapping[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    """The tables of a list in a document, each with its place for error messages.

    Raises ConfigError if the value is not a list of tables.
    """
    found = raw.get(name, [])
    if not isinstance(found, list) or not all(isinstance(t, dict) for t in found):
        raise ConfigError(f"write [[{name}]], a list of tables, got {found!r}")
    return [(f"[[{name}]] {at}", table) for at, table in enumerate(found)]


def check_keys(table: Mapping[str, Any], known: Set[str], where: str) -> None:
    """Raises ConfigError if the table has an unknown key."""
    unknown = sorted(table.keys() - known)
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
