"""Reads and checks cluster descriptions from parsed TOML. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from elche.config import RunConfig
from elche.config_checks import is_number
from elche.config_parts import FORMER_SETTINGS
from elche.errors import ConfigError
from elche.schedule.table_values import check_keys, read_table, tables
from elche.sim.cluster import (
    Cluster,
    Device,
    Drift,
    Fault,
    Link,
    LinkChange,
    SimulatedRun,
)

_NOT_IN_FILES = frozenset({"options", "batch_sizes", "runs", "bad_batches"})


def read_cluster(raw: Mapping[str, Any]) -> Cluster:
    """Reads a cluster description from parsed TOML.

    Raises:
        ConfigError: a key is unknown or missing, or a value has a wrong type or range;
            the message names the table.
    """
    check_keys(raw, {"run", "device", "link", "link_change", "fault"}, "the file")
    changes = [
        read_table(LinkChange, where, table)
        for where, table in tables(raw, "link_change")
    ]
    return Cluster(
        run=_read_run(raw.get("run")),
        devices=tuple(
            _read_device(where, table) for where, table in tables(raw, "device")
        ),
        link=read_table(Link, "[link]", raw.get("link", {})),
        link_changes=tuple(sorted(changes, key=lambda change: change.at_s)),
        faults=tuple(
            _read_fault(where, table) for where, table in tables(raw, "fault")
        ),
    )


def _read_run(raw: object) -> SimulatedRun:
    if not isinstance(raw, dict):
        raise ConfigError("a cluster file needs a table [run]")
    own = {item.name for item in fields(SimulatedRun)} - _NOT_IN_FILES
    options = {item.name for item in fields(RunConfig)} - own
    check_keys(raw, own | options | (raw.keys() & FORMER_SETTINGS.keys()), "[run]")
    if "samples" not in raw:
        raise ConfigError("[run]: the key 'samples' is missing")
    values = {name: value for name, value in raw.items() if name in own}
    others = {name: value for name, value in raw.items() if name not in own}
    return read_table(SimulatedRun, "[run]", values, options=others)


def _read_device(where: str, raw: Mapping[str, Any]) -> Device:
    drift = raw.get("drift", [])
    if not isinstance(drift, list):
        raise ConfigError(f"{where}: drift must be a list of tables, got {drift!r}")
    drifts = tuple(
        read_table(Drift, f"{where}, drift {at}", table)
        for at, table in enumerate(drift)
    )
    curve = raw.get("curve", [])
    if not isinstance(curve, list) or not all(map(_is_point, curve)):
        raise ConfigError(
            f"{where}: curve must be a list of [samples, seconds], got {curve!r}"
        )
    points = tuple((samples, seconds) for samples, seconds in curve)
    return read_table(Device, where, raw, drift=drifts, curve=points)


def _is_point(raw: object) -> bool:
    return isinstance(raw, list) and len(raw) == 2 and all(map(is_number, raw))


def _read_fault(where: str, raw: Mapping[str, Any]) -> Fault:
    join = raw.get("join")
    if not isinstance(join, dict):
        return read_table(Fault, where, raw)
    return read_table(Fault, where, raw, join=_read_device(f"{where}, join", join))
