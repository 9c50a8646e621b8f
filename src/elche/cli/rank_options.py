"""Options of commands that start ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def numbers(
    ctx: click.Context, option: click.Parameter, text: str | None
) -> tuple[float, ...] | None:
    """Parses ``1,0.25``."""
    if text is None:
        return None
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"expected numbers like 1,0.25, got {text!r}"
        ) from error
    if not all(0 < number < float("inf") for number in found):
        raise click.BadParameter(f"expected positive numbers, got {text!r}")
    return found


def names(
    ctx: click.Context, option: click.Parameter, text: str | None
) -> tuple[str, ...] | None:
    """Parses ``cuda:0,cpu``; strips blanks around names."""
    if text is None:
        return None
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise click.BadParameter(f"expected names with commas between, got {text!r}")
    return found


def rank_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options for the number of ranks and their devices."""
    for option in (
        click.option(
            "--speeds",
            callback=numbers,
            help="Emulated CPU devices of these relative speeds, such as 1,0.25.",
        ),
        click.option(
            "--devices", callback=names, help="A device per rank, such as cuda:0,cpu."
        ),
        click.option("--nproc", type=int, help="Ranks; default: one per accelerator."),
    ):
        command = option(command)
    return command
