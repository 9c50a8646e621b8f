"""Settings of a run by their own names alone, put into their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from elche.config_parts import DebugConfig, WindowConfig

_OUTER = {"outer": "optimizer", "outer_lr": "lr", "outer_momentum": "momentum"}
_TRANSPORT = {"transport": "kind", "bucket_cap_mb": "bucket_cap_mb"}
_DEBUG = {item.name: item.name for item in fields(DebugConfig)}
_WINDOWS = {
    item.name: item.name
    for item in fields(WindowConfig)
    if item.name != "max_grad_norm"  # also an option of the `Trainer`
} | {"windows_max_grad_norm": "max_grad_norm"}


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for `elche.setup`, from a flat mapping that tests can merge and draw.

    Args:
        options: of `elche.RunConfig` and of its groups, by the last part of their
            names; those of `elche.config.OuterConfig` as ``outer``, ``outer_lr`` and
            ``outer_momentum``, a transport's kind as ``transport``, the norm of
            gradient windows as ``windows_max_grad_norm``.
    """
    rest = dict(options)
    outer = _taken(rest, _OUTER)
    windows = _taken(rest, _WINDOWS) | ({"outer": outer} if outer else {})
    groups = {
        "windows": windows,
        "transport": _taken(rest, _TRANSPORT),
        "debug": _taken(rest, _DEBUG),
    }
    return rest | {name: group for name, group in groups.items() if group}


def _taken(options: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[name]: options.pop(name) for name in names if name in options}
