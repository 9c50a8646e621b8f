"""Atomic writes: files are complete or absent, even after a crash."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


def replace_file(path: Path, text: str) -> None:
    """Writes a temporary file, and renames it to the target.

    A pipe or a device is written to directly.

    Raises:
        OSError: the file cannot be written; the old one is kept.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_story(path: Path, story: Sequence[str]) -> None:
    """Writes the event log, as far as the core keeps it.

    A failed write is only logged: the run itself has ended by then.
    """
    try:
        replace_file(path, "".join(f"{line}\n" for line in story))
    except OSError as error:
        logger.warning("cannot write the story of the run to %s: %s", path, error)
