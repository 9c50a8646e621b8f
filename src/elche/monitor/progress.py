"""Progress of long operations: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from typing_extensions import Self

logger = logging.getLogger(__name__)


class TaskProgress:
    """Progress of named tasks: rich's progress bars, or log lines.

    Draws bars on standard error if that is a terminal, or in a notebook. Elsewhere each
    task logs a line at its start, at intervals, and at its end. Use as a context
    manager, from one thread.

    Args:
        console: console to draw on, even if standard error is no terminal.
        interval_s: minimum seconds between two lines of a task.
    """

    def __init__(
        self, console: Console | None = None, interval_s: float = 10.0
    ) -> None:
        shown = console or Console(stderr=True)
        self._is_drawn = bool(console) or sys.stderr.isatty() or shown.is_jupyter
        self._interval_s = interval_s
        self._ids: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=shown,
            get_time=time.monotonic,
            redirect_stdout=sys.stdout.isatty(),  # a redirected stdout keeps its lines
        )
        if self._is_drawn:
            self._bars.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_drawn:
            self._bars.stop()

    def start(self, task: str, total: float | None) -> None:
        """Starts a task of ``total`` samples (or other units); None if unknown."""
        self._ids[task] = self._bars.add_task(task, total=total, detail="", logged_s=0)
        self._log(task, "started")

    def update(self, task: str, done: float, detail: str = "") -> None:
        """Updates a task's amount done, with a short remark in ``detail``."""
        number = self._ids[task]
        self._bars.update(number, completed=done, detail=detail)
        shown = self._bars.tasks[number]
        elapsed_s = shown.elapsed or 0.0
        if elapsed_s - shown.fields["logged_s"] >= self._interval_s:
            self._bars.update(number, logged_s=elapsed_s)
            share = f"{shown.percentage:.0f} %" if shown.total else f"{done:g}"
            self._log(task, share, detail)

    def finish(self, task: str, detail: str = "") -> None:
        """Ends a task, complete or not."""
        number = self._ids[task]
        self._bars.update(number, detail=detail)
        self._bars.stop_task(number)
        elapsed_s = self._bars.tasks[number].elapsed or 0.0
        self._log(task, f"finished after {elapsed_s:.1f} s", detail)

    def _log(self, task: str, text: str, detail: str = "") -> None:
        if not self._is_drawn:
            logger.info("%s: %s%s", task, text, f", {detail}" if detail else "")
