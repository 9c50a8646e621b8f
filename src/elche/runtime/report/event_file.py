"""The event file of a run: appended to, bounded, and read by page and report."""

from __future__ import annotations

import json
import logging
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
FLUSH_S: Final = 0.25
"""Least time between two writes."""


@final
class EventFile:
    """Appends records to ``events.jsonl``. A failed write is logged, and the last.

    Args:
        folder: its folder, which is made if it does not exist.
        appends: the file may hold records of an earlier start.
        most_bytes: size beyond which older windows are merged.

    Attributes:
        history: records of earlier starts.
    """

    def __init__(
        self, folder: Path, *, appends: bool = False, most_bytes: int = MOST_BYTES
    ) -> None:
        self._path, self._most_bytes = folder / NAME, most_bytes
        self._lines: list[str] = []
        self._flushed_s, self._is_broken = 0.0, False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self.history = self._read()
        except OSError as error:
            raise ConfigError(
                f"expected a folder for events to write to, got {folder}: "
                f"{error.strerror}"
            ) from error
        if self.history.records and not appends:
            self._file.close()
            raise ConfigError(
                f"expected a folder without events, got {folder} with another run's; "
                f"name another folder, or remove {self._path}"
            )
        if not self.history.records:
            about = {"kind": "file", "format": FORMAT, "version": VERSION}
            self.add({"t": time.time(), **about})

    def _read(self) -> RunHistory:
        history, text = RunHistory(), self._path.read_text("utf-8", "replace")
        if text and not text.endswith("\n"):
            self._file.write(b"\n")  # a crash has cut the last line off
        history.feed(text + "\n")
        return history

    def add(self, record: Record) -> None:
        """Adds a record; it is written with others, an event or an end at once."""
        self._lines.append(json.dumps(record, separators=(",", ":")) + "\n")
        is_due = time.monotonic() - self._flushed_s >= FLUSH_S
        if is_due or record["kind"] in ("event", "end"):
            self.flush()

    def flush(self) -> None:
        """Writes what has been added; merges older windows if the file is too large."""
        text, self._lines = "".join(self._lines), []
        self._flushed_s = time.monotonic()
        if self._is_broken or not text:
            return
        try:
            self._file.write(text.encode())
            if self._file.tell() > self._most_bytes:
                self._shrink()
        except (OSError, ConfigError) as error:
            self._is_broken = True
            logger.warning("no more events are written to %s: %s", self._path, error)

    def _shrink(self) -> None:
        """Replaces the file; readers see a new one."""
        lines = map(json.dumps, coarser(self._read().records))
        replace_file(self._path, "".join(f"{line}\n" for line in lines))
        self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self._most_bytes = max(self._most_bytes, self._file.tell() * 5 // 4)

    def close(self) -> None:
        """Writes the rest."""
        self.flush()
        self._file.close()
