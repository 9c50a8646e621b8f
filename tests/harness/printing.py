"""A started program, and what it has printed."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path


class Printing:
    """A program in a session of its own, without a terminal.

    Args:
        process: the program.
        output: file of what it prints.
        wait_s: how long is waited for a line, or for its end.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], output: Path, wait_s: float
    ) -> None:
        self.process, self._wait_s = process, wait_s
        self._output = output

    @property
    def output(self) -> str:
        """All of it so far."""
        return self._output.read_text(errors="replace")

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """What matches, as soon as it is there so many times."""
        deadline_s = time.monotonic() + self._wait_s
        while time.monotonic() < deadline_s:
            has_ended = self.process.poll() is not None  # before its last words
            found = re.findall(pattern, self.output)
            if len(found) >= count:
                return found
            assert not has_ended, self.output
            time.sleep(0.02)
        raise AssertionError(f"expected {pattern!r} {count} times in:\n{self.output}")

    def wait_until_idle(self) -> None:
        """Returns when it has acted on all that was sent to it before."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        deadline_s = time.monotonic() + self._wait_s
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def end(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(self._wait_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after:\n{self.output}") from None
