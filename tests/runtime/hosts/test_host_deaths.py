"""Ranks and hosts of a run over several hosts that die or leave: the others go on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.printing import Printing
from tests.runtime.hosts.launchers import WAIT_S, Cluster, launched

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "runtime" / "hosts" / "cases" / "counted.py"
TRAINER = ROOT / "tests" / "trainer" / "cases" / "trainer_script.py"
SAMPLES = 200
RANKS = ("1", "1,1"), ("1,1", "1")
"""Of the two hosts."""
GOES_ON_S = 8.0
"""Less than silence, of 10 s."""
POLICIES = ["sync", "cadence", "async"]


def counting(folder: Path, *words: str, speeds: tuple[str, ...]) -> Cluster:
    """Hosts that run the counting script; its words begin with the policy."""
    policy, *more = words
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = {"PYTHONPATH": os.pathsep.join(paths)}
    return Cluster(
        folder,
        ranks=[("--speeds", each) for each in speeds],
        script=(str(SCRIPT), policy, str(folder), *more),
        environments=[
            {"ELCHE_HOST": name, **path}
            for name in map("host{}".format, range(len(speeds)))
        ],
    )


def wait_for_all(hosts: list[Printing], pattern: str, count: int = 1) -> list[str]:
    """What matches in the output of any host, as soon as it is there so many times."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        found = [m for host in hosts for m in re.findall(pattern, host.output)]
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError([host.output for host in hosts])


def end_run(folder: Path, hosts: list[Printing]) -> None:
    """Those who live end with the epoch that they are in."""
    (folder / "over").touch()
    for host in hosts:
        assert host.end() == 0, host.output


def check_once(folder: Path, hosts: list[Printing], world: int) -> Counter[str]:
    """The three accounts; how often loops were handed each sample of an epoch."""
    said = (
        rf"is done, one of {world}: (\d+) epochs, (\d+) to (\d+) times, (\d+) samples"
    )
    found = [m for host in hosts for m in re.findall(said + r", (\S+),", host.output)]
    assert len(found) == world, [host.output for host in hosts]
    assert len({*found}) == 1, found
    epochs, least, most, samples = map(int, found[0][:4])
    assert (least, most, samples) == (epochs, epochs, epochs * SAMPLES)
    handed: Counter[str] = Counter()
    for path in folder.glob("log*.txt"):
        for line in path.read_text().splitlines():
            epoch, *indices = line.split()
            handed.update(f"{epoch} {index}" for index in indices)
    assert len(handed) == epochs * SAMPLES
    return handed


@pytest.mark.parametrize(
    ("policy", "rank", "place", "speeds"),
    [
        ("sync", 2, "backward", RANKS[0]),
        pytest.param("async", 2, "batch", RANKS[1], marks=pytest.mark.slow),
        pytest.param("cadence", 2, "after summing", RANKS[0], marks=pytest.mark.slow),
        pytest.param("sync", 0, "batch", RANKS[1], marks=pytest.mark.slow),
        pytest.param("sync", 0, "backward", RANKS[0], marks=pytest.mark.slow),
        pytest.param("cadence", 0, "after closed", RANKS[1], marks=pytest.mark.slow),
        pytest.param("async", 1, "after summing", RANKS[0], marks=pytest.mark.slow),
        pytest.param("async", 0, "before closed", RANKS[0], marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_on_any_host_is_outlived(
    tmp_path: Path, policy: str, rank: int, place: str, speeds: tuple[str, str]
) -> None:
    words = policy, str(rank), place
    with launched(counting(tmp_path, *words, speeds=speeds)) as hosts:
        others = [each for each in range(3) if each != rank]
        said = f"rank {rank} died: going on with ranks {others[0]}, {others[1]}"
        wait_for_all(hosts, said)
        wait_for_all(hosts, "is one of 2 at", 2)
        end_run(tmp_path, hosts)
    check_once(tmp_path, hosts, world=2)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_whose_launcher_is_killed_is_outlived_at_once(
    tmp_path: Path, policy: str
) -> None:
    """By the end of its connection, as its ranks live, and by no silence."""
    two = counting(tmp_path, policy, "lasts", speeds=("1,1", "1,1"))
    with launched(two) as hosts:
        wait_for_all(hosts, "trains at", 4)
        hosts[1].process.kill()
        killed_s = time.monotonic()
        found = hosts[0].wait_for(r"is one of 2 at (\d+\.\d{3})", 2)
        assert max(map(float, found)) - killed_s < GOES_ON_S
        os.killpg(hosts[1].process.pid, signal.SIGKILL)
        assert hosts[1].end() == -signal.SIGKILL
        end_run(tmp_path, hosts[:1])
    assert "ranks 2, 3 died: going on with ranks 0, 1" in hosts[0].output
    assert "by shared memory" in hosts[0].output  # of those that are on one host now
    check_once(tmp_path, hosts[:1], world=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "number"),
    [
        ("async", signal.SIGINT),
        ("sync", signal.SIGTERM),
        ("cadence", signal.SIGTERM),
    ],
)
def test_a_host_that_is_preempted_leaves_and_nothing_is_done_twice(
    tmp_path: Path, policy: str, number: signal.Signals
) -> None:
    with launched(counting(tmp_path, policy, speeds=("1", "1,1"))) as hosts:
        wait_for_all(hosts, "trains at", 3)
        os.killpg(hosts[1].process.pid, number)  # as a terminal does
        assert hosts[1].end() == 128 + number, hosts[1].output
        hosts[0].wait_for("is one of 1 at")
        end_run(tmp_path, hosts[:1])
    name = number.name
    assert f"this host was sent {name} and has left the run" in hosts[1].output
    assert f"leaves the run: its launcher was sent {name}" in hosts[0].output
    assert "ranks 1, 2 left: going on with rank 0" in hosts[0].output
    assert not any("Traceback" in host.output for host in hosts)
    handed = check_once(tmp_path, hosts[:1], world=1)
    assert set(handed.values()) == {1}


@pytest.mark.slow
def test_who_cannot_leave_in_time_is_killed_and_outlived(tmp_path: Path) -> None:
    two = counting(tmp_path, "cadence", "1", "sleeps", speeds=("1", "1"))
    with launched(two) as hosts:
        wait_for_all(hosts, "trains at", 2)
        hosts[1].process.send_signal(signal.SIGTERM)
        assert hosts[1].end() == 143, hosts[1].output
        hosts[0].wait_for("rank 1 died: going on with rank 0")
        end_run(tmp_path, hosts[:1])
    check_once(tmp_path, hosts[:1], world=1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_hosts_go_one_after_the_other(tmp_path: Path, policy: str) -> None:
    three = counting(tmp_path, policy, speeds=("1", "1,1", "1"))
    with launched(three) as hosts:
        wait_for_all(hosts, "trains at", 4)
        hosts[1].process.send_signal(signal.SIGTERM)
        assert hosts[1].end() == 143, hosts[1].output
        wait_for_all(hosts, "is one of 2 at", 2)
        hosts[2].process.kill()
        hosts[0].wait_for("rank 3 died: going on with rank 0")
        end_run(tmp_path, hosts[:1])
    check_once(tmp_path, hosts[:1], world=1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_is_stopped_on_another_host_is_fenced(
    tmp_path: Path, policy: str
) -> None:
    words = policy, "2", "stopped"
    with launched(counting(tmp_path, *words, speeds=RANKS[0])) as hosts:
        hosts[0].wait_for("rank 2 died: going on with ranks 0, 1")
        end_run(tmp_path, hosts)
    assert "ranks [2] ended with codes [137 (SIGKILL)]" in hosts[0].output
    check_once(tmp_path, hosts, world=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [("mortal", "survive=False"), ("meets", "a script that meets in torch.distr")],
)
def test_a_host_ends_a_run_that_is_not_to_survive(
    tmp_path: Path, what: str, says: str
) -> None:
    with launched(counting(tmp_path, "sync", what, speeds=RANKS[0])) as hosts:
        wait_for_all(hosts, "trains at", 3)
        hosts[1].process.kill()
        assert hosts[0].end() == 137
    said = rf"rank 1 failed: the launcher of host 1 \(.*the death of a rank ends {says}"
    assert re.search(said, hosts[0].output), hosts[0].output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "at"),
    [("sync", (1,)), ("cadence", (1,)), ("sync", (0,)), ("cadence", (1, 0))],
)
def test_a_trainer_goes_on_or_ends_with_a_checkpoint(
    tmp_path: Path, policy: str, at: tuple[int, ...]
) -> None:
    """A follower leaves; the leader's launcher ends the run, as where all are told."""
    words = (str(TRAINER), policy, str(tmp_path / "checkpoints"))
    two = Cluster(tmp_path, ranks=(("--nproc", "1"),) * 2, script=words)
    with launched(two) as hosts:
        for host in hosts:
            host.wait_for("20 batches")
        for number in at:
            hosts[number].process.send_signal(signal.SIGTERM)
        if at == (1,):
            assert hosts[1].end() == 143, hosts[1].output
            hosts[0].wait_for("rank 1 left: going on with rank 0")
            hosts[0].process.send_signal(signal.SIGTERM)
        assert [host.end() for host in hosts] == [143, 143], hosts[0].output
        found = hosts[0].wait_for(r"ended by (.*)\n")
        assert found[0].startswith("SIGTERM: ")
        assert not any("Traceback" in host.output for host in hosts)
    assert list(tmp_path.glob("checkpoints/*/manifest.json"))
