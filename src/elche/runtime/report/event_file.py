"""The event file of a run: appended to, bounded, and read by page and report."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from pathlib import Path
from typing import Final, final

from elche.errors import ConfigError
from elche.monitor.event_records import FORMAT, VERSION, Record, coarser
from elche.monitor.run_history import RunHistory
from elche.runtime.report.files import replace_file

logger = logging.getLogger(__name__)

NAME: Final = "events.jsonl"
MOST_BYTES: Final = 8_000_000
"""Size beyond which older windows are merged."""
MOST_LINES: Final = 1000
"""Most records of a single write."""
CLOSE_S: Final = 10.0
"""Longest wait for the last records to be written."""


@final
class EventFile:
    """Appends records to ``events.jsonl``; a failed write is logged and ends it.

    A thread writes, so that the run does not wait for the disk, or seconds for merging.

    Args:
        folder: its folder, which is made if it does not exist.
        appends: the file may hold an earlier start's records; errors end recording.
        most_bytes: size beyond which older windows are merged.

    Attributes:
        starts: number of earlier starts in the file.
        epoch_starts, epoch_sizes: as in `RunHistory`.

    Raises:
        ConfigError: the folder cannot be used, or has another run that has trained.
    """

    def __init__(
        self, folder: Path, *, appends: bool = False, most_bytes: int = MOST_BYTES
    ) -> None:
        self._path, self._most_bytes = folder / NAME, most_bytes
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_broken, self.starts = False, 0
        self.epoch_starts, self.epoch_sizes = dict[int, int](), dict[int, int]()
        self._thread = threading.Thread(target=self._write_lines, daemon=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            history = self._read()
        except (OSError, ConfigError) as error:
            if appends:
                return self._give_up(error)
            raise ConfigError(
                f"expected a folder for events to write to, got {folder}: {error}"
            ) from error
        if not appends and _has_trained(history):
            self._file.close()
            raise ConfigError(
                f"expected a folder without events, got {folder} with another run's; "
                f"name another folder, or remove {self._path}"
            )
        self.starts, self.epoch_starts = len(history.runs), history.epoch_starts
        self.epoch_sizes = history.epoch_sizes
        if not history.records:
            about = {"kind": "file", "format": FORMAT, "version": VERSION}
            self.add({"t": time.time(), **about})
        self._thread.start()

    def _read(self) -> RunHistory:
        history, text = RunHistory(), self._path.read_text("utf-8", "replace")
        if text and not text.endswith("\n"):
            self._file.write(b"\n")  # a crash has cut the last line off
        history.feed(text + "\n")
        return history

    def add(self, record: Record) -> None:
        """Adds a record; it is written soon, without a wait."""
        if not self._is_broken:
            self._lines.put(json.dumps(record, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Writes the rest."""
        if self._thread.is_alive():
            self._lines.put("")
            self._thread.join(CLOSE_S)

    def _write_lines(self) -> None:
        is_open = True
        try:
            while is_open:
                lines = [self._lines.get()]
                while not self._lines.empty() and len(lines) < MOST_LINES:
                    lines.append(self._lines.get())
                is_open = lines[-1] != ""
                self._file.write("".join(lines).encode())
                if self._file.tell() > self._most_bytes:
                    self._shrink()
            self._file.close()
        except Exception as error:  # no run ends for its events
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_broken = True
        logger.warning("no more events are written to %s: %s", self._path, error)

    def _shrink(self) -> None:
        """Replaces the file; readers see a new one."""
        lines = map(json.dumps, coarser(self._read().records))
        replace_file(self._path, "".join(f"{line}\n" for line in lines))
        self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self._most_bytes = max(self._most_bytes, self._file.tell() * 5 // 4)


def _has_trained(history: RunHistory) -> bool:
    """True after a window, or an end without failure: not all runs have windows."""
    end = history.end
    return bool(history.windows or (end and not any(end["exit_codes"])))
