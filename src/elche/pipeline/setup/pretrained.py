"""Models of transformers: their own initialisation, and the tested versions."""

from __future__ import annotations

import logging
import re
import sys
from functools import cache
from typing import Any

from torch import nn

from elche.runtime.process.environment import read_placement

NEWEST_TRIED = (5, 24)
"""Newest release of transformers with which elche was tested."""

logger = logging.getLogger(__name__)


def is_pretrained(module: Any) -> bool:
    """True for a PreTrainedModel; does not import transformers."""
    found = sys.modules.get("transformers.modeling_utils")
    return found is not None and isinstance(module, found.PreTrainedModel)


def owners(model: Any, owner: Any = None) -> dict[int, Any]:
    """Innermost PreTrainedModel around each submodule, by the submodule's id.

    Its `_init_weights` initialises the submodule, computed buffers included.
    """
    if not isinstance(model, nn.Module):
        return {}
    if is_pretrained(model):
        owner = model
        log_untried()
    found = {} if owner is None else {id(model): owner}
    for child in model.children():
        found |= owners(child, owner)
    return found


@cache
def log_untried() -> None:
    """Logs once if the installed transformers is newer than all tested releases."""
    version = str(sys.modules["transformers"].__version__)
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers > NEWEST_TRIED and read_placement().rank == 0:
        logger.warning(
            "transformers %s was never tried with elche; the newest tested release is "
            "%s: install it if a model is refused or generates without a cache",
            version,
            ".".join(map(str, NEWEST_TRIED)),
        )
