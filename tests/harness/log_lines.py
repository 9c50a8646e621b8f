"""Log lines of one logger: `caplog` does not reach what runs in child processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages of a logger and its children, from a level on, as they come."""
    said: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger(name)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
