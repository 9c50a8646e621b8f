"""Progress of long operations: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from types import TracebackType
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

logger = logging.getLogger(__name__)


class ProgressReporter(ABC):
    """Shows how far named tasks are; a context manager.

    A task is named by a word of the caller's choice. All methods may be called
    from one thread only.
    """

    def __enter__(self) -> ProgressReporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def start(self, task: str, total: float | None) -> None:
        """Begin a task of `total` samples, or whatever the caller counts.

        None where that is not known.
        """

    @abstractmethod
    def update(self, task: str, done: float, detail: str = "") -> None:
        """Say that `done` of the total is done; `detail` is a short remark."""

    @abstractmethod
    def finish(self, task: str, detail: str = "") -> None:
        """End a task, whatever was left of it."""

    @abstractmethod
    def close(self) -> None:
        """Give the terminal back."""


def open_progress(
    terminal: bool | None = None, interval_s: float = 10.0
) -> ProgressReporter:
    """Bars on standard error if it is a terminal, otherwise lines in the log.

    Args:
        terminal: decide it here instead of by looking.
        interval_s: least seconds between two lines of a task in the log.
    """
    if sys.stderr.isatty() if terminal is None else terminal:
        return BarProgress()
    return LogProgress(interval_s)


@final
class BarProgress(ProgressReporter):
    """A live bar per task, drawn by rich."""

    def __init__(self, console: Console | None = None) -> None:
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

    def start(self, task: str, total: float | None) -> None:
        """Add a bar."""
        self._tasks[task] = self._progress.add_task(task, total=total, detail="")

    def update(self, task: str, done: float, detail: str = "") -> None:
        """Move the bar."""
        self._progress.update(self._tasks[task], completed=done, detail=detail)

    def finish(self, task: str, detail: str = "") -> None:
        """Stop the bar's clock where it is; it stays on the screen."""
        self._progress.update(self._tasks[task], detail=detail)
        self._progress.stop_task(self._tasks[task])

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


@final
class LogProgress(ProgressReporter):
    """A line in the log when a task begins, now and then, and when it ends."""

    def __init__(self, interval_s: float = 10.0) -> None:
        self._interval_s = interval_s
        self._totals: dict[str, float | None] = {}
        self._begin_s: dict[str, float] = {}
        self._logged_s: dict[str, float] = {}

    def start(self, task: str, total: float | None) -> None:
        """Log the beginning."""
        now_s = time.monotonic()
        self._totals[task] = total
        self._begin_s[task] = self._logged_s[task] = now_s
        logger.info("%s: started", task)

    def update(self, task: str, done: float, detail: str = "") -> None:
        """Log a line if the last one is old enough."""
        now_s = time.monotonic()
        if now_s - self._logged_s[task] < self._interval_s:
            return
        self._logged_s[task] = now_s
        total, remark = self._totals[task], f", {detail}" if detail else ""
        if total is None:
            logger.info("%s: %g%s", task, done, remark)
            return
        percent = 100 * done / total if total else 100.0
        logger.info("%s: %.0f %%%s", task, percent, remark)

    def finish(self, task: str, detail: str = "") -> None:
        """Log the end and how long it took."""
        elapsed_s = time.monotonic() - self._begin_s[task]
        remark = f", {detail}" if detail else ""
        logger.info("%s: finished after %.1f s%s", task, elapsed_s, remark)

    def close(self) -> None:
        """Nothing to give back."""
