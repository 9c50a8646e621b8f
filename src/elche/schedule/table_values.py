"""Values of a TOML table, checked as they are read. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, TypeGuard

from elche.errors import ConfigError


def number(
    table: Mapping[str, Any], key: str, where: str, default: float | None = None
) -> float:
    """A number of a table.

    Raises:
        ConfigError: it is missing and has no default, or is not a number.
    """
    value = table.get(key, default)
    if not is_number(value):
        raise ConfigError(f"{where}: expected a number for {key}, got {value!r}")
    return float(value)


def tables(raw: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The tables of a list in a document; none where it is not there.

    Raises:
        ConfigError: it is no list of tables.
    """
    found = raw.get(name, [])
    if not isinstance(found, list) or not all(isinstance(t, dict) for t in found):
        raise ConfigError(f"write [[{name}]], a list of tables, got {found!r}")
    return found


def is_number(value: object) -> TypeGuard[int | float]:
    """True if it is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_keys(table: Mapping[str, Any], known: Set[str], where: str) -> None:
    """Refuses a key that means nothing.

    Raises:
        ConfigError: there is one.
    """
    unknown = sorted(table.keys() - known)
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
