"""Options of `elche run` about checkpoints and restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_OPTIONS = (
    click.option(
        "--checkpoint-dir",
        envvar="ELCHE_CHECKPOINT_DIR",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder for checkpoints of loops over elche.epochs().",
    ),
    click.option(
        "--checkpoint-every",
        "every_s",
        type=float,
        metavar="SECONDS",
        help="Time between two checkpoints, inside epochs too.",
    ),
    click.option(
        "--keep",
        type=int,
        default=2,
        show_default=True,
        help="Complete checkpoints to keep, the newest.",
    ),
    click.option(
        "--resume", is_flag=True, help="Go on from the newest checkpoint of the folder."
    ),
    click.option(
        "--max-restarts",
        type=int,
        default=0,
        show_default=True,
        help="Start all ranks anew after a death, from the newest checkpoint, at most"
        " this often.",
    ),
)


def restart_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command, whose values `RestartConfig` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
