"""A Ray cluster whose nodes have a network namespace each, so that links can be cut."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.links.namespaces import Link, slow_link
from elche.errors import ConfigError
from tests.ray.cases.driving import NODES
from tests.ray.test_cluster_run import Counted, kill_all

PORT = 6399


@dataclass(frozen=True)
class SeparateNodes:
    """A head without ranks, and three nodes, by their numbers.

    Attributes:
        link: their namespaces and cables; the head is on the switch.
        folder: of Ray's session.
    """

    link: Link
    folder: str

    def start(self, node: int | None) -> subprocess.Popen[bytes]:
        """Starts a node, None being the head; the process ends when that is up."""
        head = self.link.coordinator
        where = [f"--node-ip-address={head if node is None else self._at(node)[1]}"]
        if node is None:
            where += ["--head", f"--port={PORT}", "--num-cpus=0"]
            where += ["--include-dashboard=false", f"--temp-dir={self.folder}"]
        else:
            kind, ranks = NODES[node]
            has = json.dumps({kind: ranks})
            where += [f"--num-cpus={ranks}", f"--resources={has}"]
            where += [f"--address={head}:{PORT}"]
        ray = str(Path(sys.executable).with_name("ray"))
        memory = f"--object-store-memory={80 << 20}"
        return self._run(self._at(node)[0], ray, "start", *where, memory)

    @contextmanager
    def drive(self, run: str, folder: Path, policy: str) -> Iterator[Counted]:
        """Runs `driving` on the head."""
        words = "-m", "tests.ray.cases.driving", run, str(folder), policy
        address = f"{self.link.coordinator}:{PORT}"
        driver = self._run(self._at(None)[0], sys.executable, *words, address)
        with ThreadPoolExecutor(1) as pool:
            try:
                yield Counted(folder, pool.submit(driver.wait))
            finally:
                driver.kill()

    def pids(self, node: int | None) -> list[int]:
        """All processes of a node."""
        words = "ip", "netns", "pids", self._at(node)[0]
        listed = subprocess.run(words, capture_output=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self, node: int | None) -> None:
        """Kills all processes of a node."""
        while left := self.pids(node):  # some may be starting others
            kill_all(left)

    def _at(self, node: int | None) -> tuple[str, str]:
        if node is None:
            return self.link.switch, self.link.coordinator
        return self.link.ranks[node]

    def _run(self, namespace: str, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["ip", "netns", "exec", namespace, *words])


@contextmanager
def separate_nodes() -> Iterator[SeparateNodes]:
    """Starts the head and all nodes; skips the test where namespaces are refused."""
    folder = tempfile.mkdtemp(prefix="elche", dir="/tmp")  # of sockets: a short path
    try:
        with slow_link(len(NODES), 1000.0) as link:
            nodes = SeparateNodes(link, folder)
            everything = None, *range(len(NODES))
            up = "ip", "-n", link.switch, "link", "set", "lo", "up"
            subprocess.run(up, check=True)
            try:
                for node in everything:
                    assert nodes.start(node).wait(120.0) == 0
                yield nodes
            finally:
                for node in everything:
                    nodes.kill(node)
    except ConfigError as error:
        pytest.skip(f"needs network namespaces: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
