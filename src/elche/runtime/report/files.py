"""Files that are there whole or not at all, whatever ends the process or the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


def replace_file(path: Path, text: str) -> None:
    """Writes a file beside the one that it then takes the place of.

    A pipe or a device is written to as it is.

    Raises:
        OSError: it cannot be written; what was there before still is.
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
    """Writes the log of messages and decisions, as far as the core keeps it.

    What cannot be written is logged: the run itself has ended by then.
    """
    try:
        replace_file(path, "".join(f"{line}\n" for line in story))
    except OSError as error:
        logger.warning("cannot write the story of the run to %s: %s", path, error)
