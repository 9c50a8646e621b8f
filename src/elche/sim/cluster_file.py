"""Cluster descriptions as TOML gives them, read and checked.

Every mistake is named with its table, so that a file can be corrected without reading
code. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from elche.config import RunConfig
from elche.config_parts import FORMER_SETTINGS
from elche.errors import ConfigError
from elche.schedule.table_values import is_number, tables
from elche.sim.cluster import (
    Cluster,
    Device,
    Drift,
    Fault,
    Link,
    LinkChange,
    SimulatedRun,
)

Table = TypeVar("Table")

_NOT_IN_FILES = frozenset({"options", "batch_sizes", "runs", "bad_batches"})
_TYPES: dict[str, tuple[type, ...]] = {
    "float": (int, float),
    "float | None": (int, float),
    "int": (int,),
    "int | None": (int,),
    "str": (str,),
    "int | Device | None": (int, Device),
    "tuple[Drift, ...]": (tuple,),
    "tuple[tuple[float, float], ...]": (tuple,),
}


def read_cluster(raw: Mapping[str, Any]) -> Cluster:
    """Reads a cluster description, as TOML gives it.

    Raises:
        ConfigError: something is unknown, missing, or of a wrong type or value;
            the message names the table.
    """
    known = ("run", "device", "link", "link_change", "fault")
    for name in raw:
        if name not in known:
            raise ConfigError(f"unknown table {name!r}; known are: {', '.join(known)}")
    faults = [
        {**entry, "join": _read_join(f"[[fault]] {at}", entry["join"])}
        if "join" in entry
        else entry
        for at, entry in enumerate(tables(raw, "fault"))
    ]
    changes = _read_all(LinkChange, "link_change", tables(raw, "link_change"))
    return Cluster(
        run=_read_run(raw.get("run")),
        devices=tuple(
            _read_device(f"[[device]] {at}", entry)
            for at, entry in enumerate(tables(raw, "device"))
        ),
        link=_read(Link, "[link]", raw.get("link", {})),
        link_changes=tuple(sorted(changes, key=lambda change: change.at_s)),
        faults=tuple(_read_all(Fault, "fault", faults)),
    )


def _read_all(kind: type[Table], name: str, tables: list[Any]) -> list[Table]:
    return [_read(kind, f"[[{name}]] {at}", table) for at, table in enumerate(tables)]


def _read_run(raw: object) -> SimulatedRun:
    where = "[run]"
    if not isinstance(raw, dict):
        raise ConfigError("a cluster file needs a table [run]")
    own = {item.name for item in fields(SimulatedRun)} - _NOT_IN_FILES
    options = {name: value for name, value in raw.items() if name not in own}
    known = {item.name for item in fields(RunConfig)}
    for name in options:
        if name not in known | set(FORMER_SETTINGS):
            raise ConfigError(
                f"{where}: unknown key {name!r}; known are: "
                f"{', '.join(sorted(own | known))}"
            )
    if "samples" not in raw:
        raise ConfigError(f"{where}: the key 'samples' is missing")
    values = {name: value for name, value in raw.items() if name in own}
    return _read(SimulatedRun, where, values, options=options)


def _read_device(where: str, raw: Mapping[str, Any]) -> Device:
    drift = raw.get("drift", [])
    if not isinstance(drift, list):
        raise ConfigError(f"{where}: drift must be a list of tables, got {drift!r}")
    drifts = tuple(
        _read(Drift, f"{where}, drift {at}", entry) for at, entry in enumerate(drift)
    )
    curve = raw.get("curve", [])
    if not isinstance(curve, list) or not all(map(_is_point, curve)):
        raise ConfigError(
            f"{where}: curve must be a list of [samples, seconds], got {curve!r}"
        )
    points = tuple((samples, seconds) for samples, seconds in curve)
    return _read(Device, where, {**raw, "drift": drifts, "curve": points})


def _is_point(raw: object) -> bool:
    return isinstance(raw, list) and len(raw) == 2 and all(map(is_number, raw))


def _read_join(where: str, raw: object) -> object:
    return _read_device(f"{where}, join", raw) if isinstance(raw, dict) else raw


def _read(kind: type[Table], where: str, raw: object, **more: Any) -> Table:
    """A frozen value of a table; every complaint begins with where it stands."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a table, got {raw!r}")
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for name, value in raw.items():
        item = known.get(name)
        if item is None or name in _NOT_IN_FILES:
            shown = sorted(known.keys() - _NOT_IN_FILES)
            raise ConfigError(
                f"{where}: unknown key {name!r}; known are: {', '.join(shown)}"
            )
        expected = _TYPES[str(item.type)]
        if isinstance(value, bool) or not isinstance(value, expected):
            words = " or ".join(one.__name__ for one in expected)
            raise ConfigError(f"{where}: {name} must be {words}, got {value!r}")
    for name, item in known.items():
        needed = item.default is MISSING and item.default_factory is MISSING
        if needed and name not in raw and name not in more:
            raise ConfigError(f"{where}: the key {name!r} is missing")
    try:
        return kind(**raw, **more)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
