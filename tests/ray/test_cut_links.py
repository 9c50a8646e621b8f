"""A cluster of three nodes in network namespaces, whose links are cut."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links.namespaces import Link, slow_link
from elche.errors import ConfigError
from tests.ray.test_cluster_run import Counted, check_counts, kill_all

pytestmark = [pytest.mark.distributed, pytest.mark.faults, pytest.mark.slow]

PORT = 6399
DRIVER = f"""
import sys
import ray
import elche.ray
from elche.ray import RankSpec
from tests.ray.cases.counted import count

ray.init(address=sys.argv[1] + ":{PORT}", log_to_driver=True)
ranks = [RankSpec(resources={{"CPU": 1, kind: 1}}) for kind in ("near", "far")]
elche.ray.run(count, ranks, args=(sys.argv[2], "sync"), speeds=(1.0, 1.0))
"""


class Driver(Future[Any]):
    """The driver's process, as `Counted` looks at it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self.process = process

    def done(self) -> bool:
        return self.process.poll() is not None

    def result(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)


@contextmanager
def emptied(namespace: str) -> Iterator[None]:
    """In the end kills every process in a namespace."""
    try:
        yield
    finally:
        listed = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, check=True
        )
        kill_all([int(pid) for pid in listed.stdout.split()])


def node_words(link: Link, number: int | None) -> list[str]:
    """Command that starts a node, of a rank or the head, and ends when that is up."""
    head = link.coordinator
    if number is None:
        where = [
            "--head",
            f"--port={PORT}",
            "--num-cpus=0",
            f"--node-ip-address={head}",
            "--include-dashboard=false",
        ]
    else:
        kind = json.dumps({("near", "far")[number]: 1})
        where = [f"--address={head}:{PORT}", "--num-cpus=1", f"--resources={kind}"]
        where.append(f"--node-ip-address={link.ranks[number][1]}")
    memory = f"--object-store-memory={80 << 20}"
    ray = str(Path(sys.executable).with_name("ray"))
    namespace = link.switch if number is None else link.ranks[number][0]
    return ["ip", "netns", "exec", namespace, ray, "start", *where, memory]


def test_a_cut_link_is_waited_for_and_then_given_up(
    tmp_path: Path, record_property: Any
) -> None:
    with ExitStack() as stack:
        try:
            link = stack.enter_context(slow_link(2, 1000.0))
        except ConfigError as error:
            pytest.skip(f"needs network namespaces: {error}")
        up = ["ip", "-n", link.switch, "link", "set", "lo", "up"]
        subprocess.run(up, check=True)
        for namespace in (link.switch, *(own for own, *_ in link.ranks)):
            stack.enter_context(emptied(namespace))
        for number in (None, 0, 1):
            subprocess.run(node_words(link, number), check=True)
        there = "ip", "netns", "exec", link.switch
        words = sys.executable, "-c", DRIVER, link.coordinator, str(tmp_path)
        driver = subprocess.Popen([*there, *words])  # killed with its namespace
        run = Counted(tmp_path, Driver(driver))
        run.trains([0, 1])

        link.turn(1, "down")
        time.sleep(5.0)
        link.turn(1, "up")
        mended_s = run.trains([0, 1], time.monotonic())
        pid = run.lines(1)[-1].pid
        assert {line.pid for line in run.lines(1)} == {pid}

        link.turn(1, "down")
        cut_s = time.monotonic()
        lost_s = run.trains([0], cut_s + 1.0) + 1.0
        run.until(lambda: not Path(f"/proc/{pid}").exists(), "the end of rank 1")
        ended_s = time.monotonic() - cut_s
        assert run.stop() == 0
    check_counts(run, "sync", 1)
    figures = {"after 5 s": mended_s, "cut off": lost_s, "rank's own end": ended_s}
    record_property("seconds", figures)
    print("seconds:", figures)
    assert lost_s < 20.0, figures
