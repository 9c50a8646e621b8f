"""A started program, and what it has printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.harness.waiting import until

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What tells a script that a launcher has started it, beside elche's own."""
ENDS_WITHIN_S = 240.0
"""How long is waited for a program's line, or for its end."""
UNCOMPILED = str(Path(__file__).parent / "uncompiled")
"""In PYTHONPATH it halves the start of a rank."""


def environment_of(**changes: str) -> dict[str, str]:
    """Of a program that nothing has launched, and that compiles nothing."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ELCHE_") and name not in LAUNCHED
    }
    paths = os.pathsep.join(filter(None, [UNCOMPILED, own.get("PYTHONPATH")]))
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **changes}


def ended(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python program at its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        env=environment_of(**environment),
        check=False,
    )


@contextmanager
def started(
    folder: Path, *commands: Sequence[str], variables: Sequence[Mapping[str, str]] = ()
) -> Iterator[list[Printing]]:
    """Programs in sessions of their own; what is left of them in the end is killed.

    What they have left themselves, the leak check will say.

    Args:
        folder: of what they print.
        commands: of each.
        variables: of each, beside those of the tests.
    """
    programs: list[Printing] = []
    try:
        for number, command in enumerate(commands):
            output = folder / f"output{number}.txt"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment_of(**(variables[number] if variables else {})),
                    start_new_session=True,
                )
            programs.append(Printing(process, output))
        yield programs
    finally:
        for each in programs:
            if each.process.poll() is None:
                each.process.kill()
            each.process.wait()


class Printing:
    """A program in a session of its own, without a terminal.

    Args:
        process: the program.
        output: file of what it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process, self._output = process, output

    @property
    def output(self) -> str:
        """All of it so far."""
        return self._output.read_text(errors="replace")

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """What matches, as soon as it is there so many times."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
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
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")

    def end(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after:\n{self.output}") from None
