"""Checks and normal forms of settings. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Literal, TypeGuard, get_args, get_origin, get_type_hints

from elche.errors import ConfigError


def check_fields(
    settings: Any,
    *,
    whole: Mapping[str, int] | None = None,
    positive: Collection[str] = (),
    not_negative: Collection[str] = (),
    group: str = "",
) -> None:
    """Checks the fields of a dataclass; those that are None by default may be None.

    Args:
        settings: dataclass whose Literal and bool fields are checked by annotation.
        whole: least value of each whole number.
        positive: names of positive numbers.
        not_negative: names of numbers of at least zero.
        group: prefix of names in messages.
    """
    hints, least = _hints(settings.__class__), whole or {}
    for item in fields(settings):
        value, hint = getattr(settings, item.name), hints[item.name]
        if value is None and item.default is None:
            continue
        if get_origin(hint) is Literal:
            check_choice(group + item.name, value, get_args(hint))
        elif hint is bool:
            check_bool(group + item.name, value)
        elif item.name in least:
            check_whole(group + item.name, value, least[item.name])
        elif item.name in positive:
            check_positive(group + item.name, value)
        elif item.name in not_negative:
            check_not_negative(group + item.name, value)


_hints = cache(get_type_hints)


def caps_of(given: Mapping[int, int] | Sequence[int | None]) -> tuple[int | None, ...]:
    """One cap per rank, from a mapping or a sequence."""
    if isinstance(given, Mapping):
        for rank in given:
            check_whole("a rank in max_samples", rank, 0)
        caps = tuple(given.get(rank) for rank in range(max(given, default=-1) + 1))
    elif isinstance(given, (list, tuple)):
        caps = tuple(given)
    else:
        raise ConfigError(
            "expected max_samples to be {rank: samples}, or a number or None per rank, "
            f"got {given!r}"
        )
    for rank, cap in enumerate(caps):
        if cap is not None:
            check_whole(f"max_samples[{rank}]", cap, 1)
    return caps


def hints_of(given: Sequence[float] | None) -> tuple[float, ...] | None:
    """Checks speed hints; returns one per rank."""
    if given is None:
        return None
    if isinstance(given, (str, Mapping)) or not hasattr(given, "__iter__"):
        raise ConfigError(
            f"expected speed_hints to be a number per rank, such as (1, 0.25), got "
            f"{given!r}"
        )
    hints = tuple(given)
    for rank, speed in enumerate(hints):
        check_positive(f"speed_hints[{rank}]", speed)
    return hints


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Checks that a value is one of the known ones."""
    if value not in known:
        raise ConfigError(
            f"unknown {name} {value!r}; expected one of: {', '.join(known)}"
        )


def check_whole(name: str, value: object, least: int) -> None:
    """Checks for an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"expected {name} to be an int >= {least}, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Checks for a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"expected {name} to be True or False, got {value!r}")


def check_known(names: Iterable[str], known: Collection[str], where: str = "") -> None:
    """Refuses unknown names, and suggests the nearest known one."""
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"unknown option {name!r}{where}; {meant}known are: "
            f"{', '.join(sorted(known))}"
        )


def is_number(value: object) -> TypeGuard[float]:
    """True for a number that is not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_positive(name: str, value: object) -> None:
    """Checks for a finite number above zero."""
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise ConfigError(
            f"expected {name} to be a positive finite number, got {value!r}"
        )


def check_not_negative(name: str, value: object) -> None:
    """Checks for a finite number of at least zero."""
    if not is_number(value) or not 0 <= value < math.inf:
        raise ConfigError(f"expected {name} to be a finite number >= 0, got {value!r}")
