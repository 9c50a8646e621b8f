"""Progress of long operations: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import final

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
from typing_extensions import Self, override

logger = logging.getLogger(__name__)


class LogProgress:
    """Progress of named tasks: a line in the log at their begin, now and then, and end.

    A context manager, for one thread.

    Args:
        interval_s: least seconds between two lines of a task.
    """

    def __init__(self, interval_s: float = 10.0) -> None:
        self._interval_s = interval_s
        self._totals: dict[str, float | None] = {}
        self._begin_s: dict[str, float] = {}
        self._logged_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, task: str, total: float | None) -> None:
        """Begins a task of ``total`` samples, or whatever is counted; None: unknown."""
        now_s = time.monotonic()
        self._totals[task] = total
        self._begin_s[task] = self._logged_s[task] = now_s
        logger.info("%s: started", task)

    def update(self, task: str, done: float, detail: str = "") -> None:
        """``done`` of the total is done; ``detail`` is a short remark."""
        now_s = time.monotonic()
        if now_s - self._logged_s[task] < self._interval_s:
            return
        self._logged_s[task] = now_s
        total, remark = self._totals[task], f", {detail}" if detail else ""
        share = f"{done:g}" if not total else f"{100 * done / total:.0f} %"
        logger.info("%s: %s%s", task, share, remark)

    def finish(self, task: str, detail: str = "") -> None:
        """Ends a task, whatever was left of it."""
        elapsed_s = time.monotonic() - self._begin_s[task]
        remark = f", {detail}" if detail else ""
        logger.info("%s: finished after %.1f s%s", task, elapsed_s, remark)

    def close(self) -> None:
        """Gives the terminal back."""


@final
class BarProgress(LogProgress):
    """A live bar per task, drawn by rich.

    Args:
        console: instead of standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", style="dim"),
            console=console or Console(stderr=True),
        )
        self._progress.start()

    @override
    def start(self, task: str, total: float | None) -> None:
        self._tasks[task] = self._progress.add_task(task, total=total, detail="")

    @override
    def update(self, task: str, done: float, detail: str = "") -> None:
        self._progress.update(self._tasks[task], completed=done, detail=detail)

    @override
    def finish(self, task: str, detail: str = "") -> None:
        self._progress.update(self._tasks[task], detail=detail)
        self._progress.stop_task(self._tasks[task])

    @override
    def close(self) -> None:
        self._progress.stop()


def open_progress() -> LogProgress:
    """Bars on standard error if it is a terminal, otherwise lines in the log."""
    return BarProgress() if sys.stderr.isatty() else LogProgress()
