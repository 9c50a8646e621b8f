"""Lookup of a private name of torch, and what is known of it."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from elche.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Internal:
    """A private name of torch.

    Attributes:
        name: where it is; ``()`` stands for an instance, whose attribute it is.
        since: oldest torch that was found to have it.
        used_for: why elche needs it.
        without: what elche does where torch has it no more.
        is_there: this torch has it.
    """

    name: str
    since: str
    used_for: str
    without: str
    is_there: bool


INTERNALS: list[Internal] = []
"""Every name that this module has looked up."""


def _lookup(name: str) -> Any:
    where, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(where.removesuffix("()"))
    return getattr(owner() if where.endswith("()") else owner, attribute)


def bind(name: str, since: str, used_for: str, without: str, fallback: T) -> T:
    """Torch's object of this name, or the fallback after a warning."""
    try:
        found: T = _lookup(name)
        is_there = True
    except (AttributeError, ImportError):
        found, is_there = fallback, False
        logger.warning(
            "torch %s has no %s (%s): %s", torch.__version__, name, used_for, without
        )
    INTERNALS.append(Internal(name, since, used_for, without, is_there))
    return found


def has(name: str, since: str, used_for: str, without: str) -> bool:
    """True if torch has a name, after a warning where it has not."""
    bind(name, since, used_for, without, None)
    return INTERNALS[-1].is_there


REFUSED = "what needs it is refused"


def refusing(name: str, instead: str = "") -> Callable[..., NoReturn]:
    """A fallback where nothing else would be right."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"expected a torch that has {name}, which elche needs here; torch "
            f"{torch.__version__} has it no more: install an older torch or a newer "
            f"elche{instead and ', or '}{instead}"
        )

    return refuse


def nothing(*_: Any) -> None:
    """A hook that changes nothing."""
