"""A run's progress at the bottom of the terminal, below its ranks' output."""

from __future__ import annotations

from typing import final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from elche.coordination.protocol.events import Event, Tick
from elche.coordination.protocol.instructions import Instruction
from elche.monitor.run_view import RunView


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
        self._view = RunView()
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def see(self, message: Event | Instruction) -> None:
        """Updates the view by a message between a rank and the coordinator."""
        self._view.see(message)
        is_begun = self._live.is_started or self._view.is_training
        if isinstance(message, Tick) and is_begun:
            self._live.start()
            text = "\n".join(self._view.lines())
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


def open_display() -> LiveRun | None:
    """Opens a display on standard error, or None on a dumb terminal."""
    console = Console(stderr=True)
    return None if console.is_dumb_terminal else LiveRun(console)
