"""Lookup of private names of torch."""

from __future__ import annotations

import logging
import pkgutil
from typing import Any, NoReturn

import torch

from elche.errors import ConfigError

logger = logging.getLogger(__name__)

INTERNALS: dict[str, bool] = {}
"""Every name looked up; True if this torch has it."""


def bind(name: str, used_for: str) -> Any:
    """Returns torch's object of this name; if missing, a function that raises."""
    INTERNALS[name] = True
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        INTERNALS[name] = False
    logger.warning(
        "torch %s has no %s, which %s: this feature raises an error",
        torch.__version__,
        name,
        used_for,
    )

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"expected a torch that has {name}, which {used_for}; torch "
            f"{torch.__version__} lacks it: install an older torch or a newer elche"
        )

    return refuse
