"""Two hosts whose link is cut: network namespaces of one machine, each a host."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.links.namespaces import Link
from tests.harness.printing import Printing
from tests.runtime.hosts.joining import linked
from tests.runtime.hosts.launchers import Cluster, launched
from tests.runtime.hosts.test_host_deaths import (
    check_once,
    counting,
    end_run,
    wait_for_all,
)

pytestmark = [pytest.mark.distributed, pytest.mark.faults, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "cases" / "endless.py"
STEP = r"step \d+ at (\S+)"
POLICIES = ["sync", "cadence", "async"]


@pytest.fixture
def link() -> Iterator[Link]:
    with linked(2) as made:
        yield made


def behind(link: Link, cluster: Cluster) -> Cluster:
    """The same, each host in its namespace."""
    environments = cluster.environments or [{}, {}]
    return replace(
        cluster,
        rendezvous=f"{link.ranks[0][1]}:29500",
        prefixes=[link.command(0), link.command(1)],
        environments=[{**each, "ELCHE_HOST": ""} for each in environments],
    )


def endless(folder: Path, policy: str, timeout_s: float, *, survive: bool) -> Cluster:
    return Cluster(
        folder,
        ranks=(("--speeds", "1"), ("--speeds", "1")),
        script=(str(SCRIPT), policy, str(timeout_s), str(survive)),
    )


def steps_of(host: Printing, count: int) -> list[float]:
    """Times of the steps shown, as soon as they are so many."""
    return [float(at) for at in host.wait_for(STEP, count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_cut_is_a_wait(tmp_path: Path, link: Link, policy: str) -> None:
    two = behind(link, endless(tmp_path, policy, 60.0, survive=True))
    with launched(two) as hosts:
        steps_of(hosts[0], 3)
        cut_s = time.monotonic()
        link.turn(1, "down")
        time.sleep(4.0)  # TCP tries again after 3.0 s and 6.2 s; 12 s are a death
        link.turn(1, "up")
        up_s, before = time.monotonic(), len(steps_of(hosts[0], 3))
        found = steps_of(hosts[0], before + 10)
        # The fault has acted: windows go on for a while, and then nothing does.
        gaps = [b - a for a, b in pairwise(found)]
        if policy != "async":
            assert max(gaps) > 2.0
        assert found[-1] > up_s > cut_s
        hosts[0].process.send_signal(signal.SIGTERM)
        assert [host.end() for host in hosts] == [143, 143]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_that_is_cut_off_is_outlived(
    tmp_path: Path, link: Link, policy: str
) -> None:
    four = counting(tmp_path, policy, speeds=("1,1", "1,1"))
    with launched(behind(link, four)) as hosts:
        wait_for_all(hosts, "trains at", 4)
        cut_s = time.monotonic()
        link.turn(1, "down")
        found = hosts[0].wait_for(r"is one of 2 at (\S+)", 2)
        assert 8.0 < max(map(float, found)) - cut_s < 13.0
        assert hosts[1].end() == 1
        end_run(tmp_path, hosts[:1])
    said = r"host 0 at 10.77.0.1:29500 has been silent for 12 s, and others may go on"
    assert said in hosts[1].output
    assert "died: going on with ranks 0, 1" in hosts[0].output
    assert "by shared memory" in hosts[0].output
    assert "hang" not in hosts[0].output
    check_once(tmp_path, hosts[:1], world=2)


def test_a_long_cut_is_told_and_ends_by_name(tmp_path: Path, link: Link) -> None:
    """Where the run does not go on without a host."""
    with launched(
        behind(link, endless(tmp_path, "sync", 20.0, survive=False))
    ) as hosts:
        steps_of(hosts[0], 3)
        link.turn(1, "down")
        hosts[0].wait_for(r"rank 1 on host 1 \(.*\) has been silent for 10 s, and tra")
        hosts[1].wait_for(r"host 0 at 10\.77\.0\.1:29500 has been silent for 1\d s")
        assert [host.end() for host in hosts] == [1, 1]
        assert "nothing came for 20 s while the run was waiting for" in hosts[0].output
        assert "ranks that did not arrive: 1\n" in hosts[0].output
        assert "lost host 0 at 10.77.0.1:29500" in hosts[1].output
