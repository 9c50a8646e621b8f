"""`elche run --listen` and `elche join`, as processes of this machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

import pytest

from benchmarks.links.namespaces import Link, slow_link
from elche.errors import ConfigError
from tests.harness.printing import Printing
from tests.runtime.hosts.launchers import WAIT_S, free_port, write_key

SCRIPT = Path(__file__).parent / "cases" / "growing.py"


@final
class OpenRun:
    """A run that hosts join, each with a name of its own, so that they share no memory.

    Those that a prefix puts into a network namespace are hosts of their own by that.

    Args:
        folder: of outputs, the key, and what the script is told.
        policy: of the run.
        address: where it listens; "" for a free port of loopback.
    """

    def __init__(self, folder: Path, policy: str, address: str = "") -> None:
        self.folder = folder
        self.address = address or f"127.0.0.1:{free_port()}"
        self.key = folder / "key"
        self.script = str(SCRIPT), str(folder), policy
        self.started: list[Printing] = []

    def begin(
        self, *options: str, prefix: Sequence[str] = (), waits: bool = False
    ) -> Printing:
        """Starts the first host, with a rank unless options say otherwise.

        Args:
            *options: of its ranks.
            prefix: of its command.
            waits: its script waits until it is told to `begin`.
        """
        if not waits:
            self.tell("begin")
        listen = "--listen", "--rendezvous", self.address, "--key-file", str(self.key)
        ranks = options or ("--speeds", "1")
        words = "run", *listen, *ranks, *self.script
        first = self._start("" if prefix else "host0", words, prefix)
        first.wait_for("other hosts join by")  # its key is there now
        return first

    def begin_with_another(self) -> tuple[Printing, Printing]:
        """Starts two hosts, and returns when they train together."""
        hosts = self.begin(), self.join("host1")
        hosts[0].wait_for(r"epoch \d+ of 2 by gloo")
        return hosts

    def join(
        self,
        host: str,
        *options: str,
        key: Path | None = None,
        script: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> Printing:
        """Starts another one, with a rank unless options say otherwise."""
        ranks = options or ("--speeds", "1")
        key_file = "--key-file", str(key or self.key)
        words = "join", self.address, *ranks, *key_file, *(script or self.script)
        return self._start("" if prefix else host, words, prefix)

    def join_as_told(self, host: str, first: Printing) -> Printing:
        """Starts another one by the very line that the first one has printed."""
        (line,) = first.wait_for(r"other hosts join by: elche (join .*)\n")
        return self._start(host, shlex.split(line), ())

    def _start(
        self, host: str, words: Sequence[str], prefix: Sequence[str]
    ) -> Printing:
        output = self.folder / f"output{len(self.started)}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "elche", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "ELCHE_HOST": host},
                start_new_session=True,
            )
        printing = Printing(process, output, WAIT_S)
        self.started.append(printing)
        return printing

    def tell(self, word: str) -> None:
        """Tells the script on all hosts."""
        (self.folder / word).touch()

    def check(self, hosts: Sequence[Printing], *, deaths: int = 0) -> None:
        """All have ended well and alike, and no position was lost or counted twice.

        Args:
            hosts: that are there at the end.
            deaths: moments at which ranks died: in the epoch of each, loops may have
                been handed positions twice.
        """
        assert [host.end() for host in hosts] == [0] * len(hosts), self.outputs()
        pattern = r"done (\d+) of (\d+): (\d+) epochs, (\S+)"
        ended = [found for host in hosts for found in re.findall(pattern, host.output)]
        assert [int(found[0]) for found in ended] == [*range(len(ended))], ended
        assert {found[1:] for found in ended} == {(str(len(ended)), *ended[0][2:])}
        handed: Counter[tuple[int, int]] = Counter()
        for path in self.folder.glob("handed-*.txt"):
            for line in path.read_text().splitlines():
                epoch, *indices = map(int, line.split())
                handed.update((epoch, index) for index in indices)
        assert len(handed) == 640 * int(ended[0][2])
        again = {epoch for (epoch, _), times in handed.items() if times > 1}
        assert len(again) <= deaths, again

    def outputs(self) -> str:
        """All that was printed."""
        return "\n".join(
            f"--- {each.process.args}\n{each.output}" for each in self.started
        )

    def close(self) -> None:
        """Ends what still runs."""
        for each in self.started:
            if each.process.poll() is None:
                each.process.kill()
            each.process.wait()


@contextmanager
def linked(hosts: int) -> Iterator[Link]:
    """A network namespace for each host; skips where there can be none."""
    try:
        with slow_link(hosts, 1000.0) as link:
            yield link
    except ConfigError as error:
        pytest.skip(f"needs network namespaces: {error}")


def make_key(folder: Path) -> Path:
    """Another run's secret."""
    write_key(folder / "another")
    return folder / "another"
