"""Lines of a logger while something runs, in processes without pytest's capture."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """Messages of a logger, and of those below it, from this level on."""
    lines: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger(name)
    setattr(handler, "emit", lambda r: lines.append(r.getMessage()))  # noqa: B010
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
