"""A run's progress at the bottom of the terminal, beneath what its ranks print."""

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
    """Draws a run on standard error; from one thread.

    It is drawn anew at each tick of the coordinator, and taken away at the end. What
    ranks print must come through :meth:`print_line`, or it is torn.

    Args:
        console: instead of standard error.
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
        """Takes a message between a rank and the coordinator."""
        self._view.see(message)
        is_begun = self._live.is_started or self._view.is_training
        if isinstance(message, Tick) and is_begun:
            self._live.start()
            text = "\n".join(self._view.lines())
            shown = Text(text, no_wrap=True, overflow="ellipsis")
            self._live.update(shown, refresh=True)

    def print_line(self, line: str) -> None:
        """Prints a line of a rank, as it is."""
        self._console.print(
            line, markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def close(self) -> None:
        """Takes the view away."""
        self._live.stop()


def open_display() -> LiveRun | None:
    """Draws on standard error, if the terminal there is able to."""
    console = Console(stderr=True)
    return None if console.is_dumb_terminal else LiveRun(console)
