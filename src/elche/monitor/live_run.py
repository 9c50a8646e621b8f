"""A run's progress at the bottom of the terminal, below its ranks' output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from elche.monitor.run_history import RunHistory
from elche.monitor.run_view import run_head, run_lines


@final
class LiveRun:
    """Draws a run on standard error; use from one thread.

    Redraws the view at each tick of the coordinator, and removes it at the end. Ranks'
    output must be printed by :meth:`print_line`, or it garbles the view.

    Args:
        console: console to use instead of standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def draw(self, history: RunHistory) -> None:
        """Redraws the view, from the first epoch on."""
        if history.epochs:
            self._live.start()
            text = "\n".join(run_lines(history))
            shown = Text(text, no_wrap=True, overflow="ellipsis")
            self._live.update(shown, refresh=True)

    def print_line(self, line: str) -> None:
        """Prints a line of a rank unchanged."""
        self._console.print(
            line, markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def close(self) -> None:
        """Removes the view."""
        self._live.stop()


@final
class ProgressLines:
    """Prints a line about the run every few minutes, for a log.

    Args:
        say: prints a line.
        every_s: least seconds between two lines.
    """

    def __init__(self, say: Callable[[str], None], every_s: float = 180.0) -> None:
        self._say, self._every_s = say, every_s
        self._said_s = time.monotonic()

    def draw(self, history: RunHistory) -> None:
        """Prints the line, if it is due and an epoch has begun."""
        now_s = time.monotonic()
        if history.windows and now_s - self._said_s >= self._every_s:
            self._said_s = now_s
            self._say(run_head(history))


def open_display() -> LiveRun | None:
    """Opens a display on standard error; None if it is no terminal, or a dumb one."""
    console = Console(stderr=True)
    is_shown = sys.stderr.isatty() and not console.is_dumb_terminal
    return LiveRun(console) if is_shown else None
