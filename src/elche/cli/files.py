"""Files of commands: TOML to read, figures and schedules to write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from elche.errors import ConfigError
from elche.monitor.results import check_writable, to_json_text
from elche.schedule.actions import Schedule
from elche.schedule.formats import to_csv

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Read = TypeVar("Read")

json_option = click.option(
    "--json", "json_path", help="File for the figures; - is standard output."
)
csv_option = click.option(
    "--csv",
    "csv_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the schedule, which torch.distributed.pipelining can load.",
)


def read_toml(path: Path, make: Callable[[dict[str, Any]], Read]) -> Read:
    """Reads a TOML file and converts it by ``make``.

    Raises:
        ConfigError: the file is unreadable or ``make`` rejects it; the message names
            it.
    """
    text = read_text(path)
    try:
        return make(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_text(path: Path) -> str:
    """Reads a text file.

    Raises:
        ConfigError: the file cannot be read, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error


def check_outputs(*paths: str | Path | None) -> None:
    """Checks that result files can be written later.

    Raises:
        ConfigError: a file is not writable.
    """
    for path in paths:
        if path is not None and str(path) != "-":
            check_writable(Path(path))


def write_json(path: str | None, values: Any) -> None:
    """Writes values as JSON to a file, or to standard output for "-"."""
    if path == "-":
        sys.stdout.write(to_json_text(values))
    elif path is not None:
        Path(path).write_text(to_json_text(values), encoding="utf-8")


def write_csv(path: Path | None, schedule: Schedule) -> None:
    """Writes a schedule as CSV in torch's format."""
    if path is not None:
        path.write_text(to_csv(schedule), encoding="utf-8", newline="")
