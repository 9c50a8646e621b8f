"""Results on the screen and in files."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from elche.errors import ConfigError
from elche.monitor.table import COLUMNS, ContenderResult, plain_table, table_rows

LEFT_COLUMNS = ("contender", "note")


def print_table(
    results: Sequence[ContenderResult], title: str, stream: TextIO | None = None
) -> None:
    """Prints the table: drawn by rich on a terminal, as plain text elsewhere.

    Args:
        results: a row each.
        title: heads the table.
        stream: standard output unless given.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        stream.write(f"{title}\n\n{plain_table(results)}\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    rows = table_rows(results)
    kept = [
        index
        for index in range(len(COLUMNS))
        if any(row[index] not in ("", "-") for row in rows)
    ]
    for index in kept:
        left = COLUMNS[index] in LEFT_COLUMNS
        table.add_column(
            COLUMNS[index], justify="left" if left else "right", no_wrap=not left
        )
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    Console(file=stream).print(table)


def to_json_text(values: Any) -> str:
    """Indented JSON; numbers that JSON cannot hold become null."""
    return json.dumps(_finite(values), indent=2, allow_nan=False) + "\n"


def check_writable(path: Path) -> None:
    """Makes sure that a file can be written later; leaves it as it is.

    Raises:
        ConfigError: it cannot be.
    """
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """Shows elche's log on standard error, as plain lines."""
    logger = logging.getLogger("elche")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_finite(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None
    return values
