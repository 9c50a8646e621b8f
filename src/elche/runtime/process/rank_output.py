"""Output of ranks: passed on as it is, read line by line, or shown beside a view."""

from __future__ import annotations

import asyncio
import codecs
import io
import sys
from collections.abc import Callable
from typing import Protocol, final

from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import Instruction

LINE_BYTES = 1 << 22
LAST_LINES_S = 2.0
"""Deadline (s) to read the rest of the output after the ranks have ended."""


class Display(Protocol):
    """Shows a run; what its ranks print goes through it, so that nothing is torn."""

    def see(self, message: Event | Instruction) -> None:
        """Takes a message between a rank and the coordinator."""

    def print_line(self, line: str) -> None:
        """Prints a line of a rank."""

    def close(self) -> None:
        """Takes the view away."""


@final
class RankOutput:
    """Destination of the ranks' standard output and error.

    Args:
        on_line: takes rank and text of each line of standard output.
        display: prints lines of standard error, and those of standard output that
            would go to the terminal.

    Attributes:
        stdout: for the ranks' processes: a pipe, or None for the launcher's own.
        stderr: likewise.
    """

    def __init__(
        self, on_line: Callable[[int, str], None] | None, display: Display | None
    ) -> None:
        self._on_line, self._display = on_line, display
        shows_stdout = display is not None and sys.stdout.isatty()
        piped = asyncio.subprocess.PIPE
        self.stdout = piped if on_line is not None or shows_stdout else None
        self.stderr = None if display is None else piped
        self._readers: list[asyncio.Future[None]] = []
        self._printers: list[asyncio.Future[None]] = []

    def add(self, rank: int, process: asyncio.subprocess.Process) -> None:
        """Begins to read what a rank prints."""
        if self._on_line is not None:
            reading = _read_lines(process, rank, self._on_line)
            self._readers.append(asyncio.ensure_future(reading))
        if self._display is not None:
            streams = [process.stderr]
            if self._on_line is None:
                streams.append(process.stdout)
            for stream in filter(None, streams):
                reading = _pass_on(stream, self._display.print_line)
                self._printers.append(asyncio.ensure_future(reading))

    async def finish(self) -> None:
        """Reads what is left, when the ranks have ended."""
        await asyncio.gather(*self._readers)
        if self._printers:  # a process that a rank has left behind may hold a pipe open
            await asyncio.wait(self._printers, timeout=LAST_LINES_S)

    def close(self) -> None:
        """Takes the view away; prints nothing more."""
        for printer in self._printers:
            printer.cancel()
        if self._display is not None:
            self._display.close()


def write_whole_lines() -> None:
    """In a rank whose output is unbuffered: no line's end is written apart from it.

    Ranks may write to one file, where a line of another would stand between the two.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


async def _pass_on(
    stream: asyncio.StreamReader, print_line: Callable[[str], None]
) -> None:
    """Prints lines as they come; of one that was overwritten, as by a bar, the last."""
    rest = ""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while piece := await stream.read(LINE_BYTES):
        *lines, rest = (rest + decoder.decode(piece)).split("\n")
        for line in lines:
            print_line(_last_shown(line))
        rest = rest[max(0, rest.rstrip("\r").rfind("\r")) :]
    if rest:
        print_line(_last_shown(rest))


def _last_shown(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


async def _read_lines(
    process: asyncio.subprocess.Process, rank: int, take: Callable[[int, str], None]
) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        take(rank, line.decode(errors="replace").rstrip("\n"))
