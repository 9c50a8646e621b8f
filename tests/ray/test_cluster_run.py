"""`elche.ray.run` on a cluster: training as on one machine, and what dies and comes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

import elche.ray
from elche.errors import ConfigError, RemoteRankError
from tests.distributed.cases.tasks import Task, difference, plain, shared
from tests.harness.waiting import is_running
from tests.ray.cases.counted import SAMPLES, count
from tests.ray.conftest import NODE, own_processes

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

WAIT_S = 200.0
LIMIT_S = 900
"""Deadline of a test with several waits, on a busy machine."""
EMULATED = {"ELCHE_SPEED": "1", "ELCHE_MS_PER_SAMPLE": "2"}
"""Variables of each rank where a run has no `speeds`."""
SPEEDS = (1.0, 0.5, 0.25)
KINDS = ("fast", "middle", "slow")


@dataclass(frozen=True)
class Line:
    """A batch of a rank.

    Attributes:
        at_s: when it was done, by this machine's monotonic clock.
        pid: of the rank's process.
        world: ranks then.
        epoch: of the batch.
        text: positions that the rank trained.
    """

    at_s: float
    pid: int
    world: int
    epoch: int
    text: str = field(repr=False)

    @property
    def positions(self) -> list[int]:
        positions: list[int] = json.loads(self.text)
        return positions


@dataclass(frozen=True)
class Counted:
    """A run of `count`: the folder of its logs, and its result."""

    folder: Path
    ending: Future[Any]

    def lines(self, rank: int) -> list[Line]:
        """What a rank has logged so far, whole lines."""
        path = self.folder / f"rank-{rank}.log"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [
            Line(float(at), int(pid), int(world), int(epoch), rest)
            for at, pid, world, epoch, rest in (row.split(" ", 4) for row in whole)
        ]

    def until(self, is_so: Callable[[], object], what: str) -> float:
        """Waits until something holds, while the run goes on; when it did."""
        deadline_s = time.monotonic() + WAIT_S
        while not is_so():
            assert not self.ending.done(), (what, self.ending.result())
            assert time.monotonic() < deadline_s, f"waited for {what}"
            time.sleep(0.1)
        return time.monotonic()

    def trains(self, ranks: Sequence[int], since_s: float = 0.0) -> float:
        """Waits until each rank has trained since then; how long that took (s)."""

        def rest(rank: int) -> list[Line]:
            return [each for each in self.lines(rank) if each.at_s > since_s]

        self.until(lambda: all(map(rest, ranks)), f"batches of ranks {ranks}")
        return max(rest(rank)[0].at_s for rank in ranks) - since_s

    def stop(self) -> Any:
        """Has all ranks end after the same epoch; the result."""
        (self.folder / "new").write_text("0")
        (self.folder / "new").rename(self.folder / "stop")
        return self.ending.result(WAIT_S)

    def held(self) -> list[dict[str, Any]]:
        """What ranks held in the end."""
        return [json.loads(p.read_text()) for p in self.folder.glob("held-*.json")]


@contextmanager
def counting(folder: Path, *args: Any, **options: Any) -> Iterator[Counted]:
    """Runs `count` from a thread of its own; ranks end with the test."""
    with ThreadPoolExecutor(1) as pool:
        words = (str(folder), *args)
        ending = pool.submit(elche.ray.run, count, args=words, **options)
        try:
            yield Counted(folder, ending)
        finally:
            (folder / "stop").write_text("0")


@contextmanager
def nodes(cluster: Any, *kinds: str) -> Iterator[dict[str, Any]]:
    """A node of each kind, by its kind (`a+b`: both); in the end no node is left."""
    made = {
        kind: cluster.add_node(resources=dict.fromkeys(kind.split("+"), 1), **NODE)
        for kind in kinds
    }
    try:
        yield made
    finally:
        for node in [*cluster.worker_nodes]:
            cluster.remove_node(node)


def specs(kinds: Sequence[str]) -> list[elche.ray.RankSpec]:
    return [elche.ray.RankSpec(resources={"CPU": 0.5, kind: 1}) for kind in kinds]


def check_counts(run: Counted, policy: str, world: int) -> None:
    """Every position once per epoch, and equal models."""
    held = run.held()
    assert len(held) == world, held
    assert {each["world"] for each in held} == {world}
    assert len({each["digest"] for each in held}) == 1, held
    (epochs,) = {each["epochs"] for each in held}
    assert {each["samples"] for each in held} == {SAMPLES * epochs}
    if policy == "sync":  # windows average: see `outer` in docs/policies.md
        assert {(each["least"], each["most"]) for each in held} == {(epochs, epochs)}


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "policy", ["sync", pytest.param("async", marks=pytest.mark.slow)]
)
def test_shares_follow_speed_and_a_run_survives_what_dies(
    cluster: Any, tmp_path: Path, policy: str
) -> None:
    """Coordinator, rank, two nodes die; the places of nodes wait for others, alone."""
    figures: dict[str, float] = {}
    with (
        nodes(cluster, "fast", "middle", "slow") as there,
        counting(
            tmp_path,
            policy,
            ranks=specs(KINDS),
            speeds=SPEEDS,
            ms_per_sample=2.0,
            story=tmp_path / "story.txt",
        ) as run,
    ):
        run.until(lambda: any(x.epoch >= 6 for x in run.lines(0)), "six epochs")
        trained = {
            rank: sum(len(x.positions) for x in run.lines(rank) if 2 <= x.epoch < 6)
            for rank in range(3)
        }
        assert trained[0] > trained[1] > trained[2], trained

        (coordinator,) = (
            pid for pid, text in own_processes().items() if "serving" in text
        )
        os.kill(coordinator, signal.SIGKILL)
        figures["coordinator"] = run.trains([0, 1, 2], time.monotonic())

        pids = {rank: run.lines(rank)[0].pid for rank in range(3)}
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        figures["rank"] = run.trains([0, 2], killed_s)
        figures["rank's replacement"] = run.trains([3], killed_s)
        run.until(lambda: run.lines(0)[-1].world == 3, "three ranks")

        killed_s = time.monotonic()
        cluster.remove_node(there["slow"], allow_graceful=False)
        two_s = run.until(lambda: run.lines(0)[-1].world == 2, "two ranks")
        figures["node"] = two_s - killed_s
        cluster.remove_node(there["middle"], allow_graceful=False)
        run.until(lambda: run.lines(0)[-1].world == 1, "one rank")
        run.trains([0], time.monotonic() + 2.0)  # nothing waits for the missing ones
        added_s = time.monotonic()
        cluster.add_node(resources={"slow": 1}, **NODE)
        # Ray may tell of both nodes at once: either of the next two numbers is its.
        came_s = run.until(lambda: run.lines(4) or run.lines(5), "a replacement")
        figures["node's replacement"] = came_s - added_s
        assert run.stop()["world"] == 2
        assert {x.pid for x in run.lines(0)} == {pids[0]}  # in its process throughout
    check_counts(run, policy, 2)
    print("seconds to the next batch of the slowest survivor:", figures)
    # Survivors do not wait for a replacement, which must import torch first.
    assert figures["rank"] < figures["rank's replacement"], figures


def test_a_node_that_comes_brings_a_rank(cluster: Any, tmp_path: Path) -> None:
    """The first one another; the next one that of a node that has died."""
    ranks = elche.ray.per_node(resources={"CPU": 1, "fast": 1})
    with (
        nodes(cluster, "fast"),
        counting(tmp_path, "sync", ranks=ranks, environment=EMULATED) as run,
    ):
        run.trains([0])
        comes = cluster.add_node(resources={"fast": 1}, **NODE)
        run.trains([1])
        cluster.remove_node(comes, allow_graceful=False)
        run.until(lambda: run.lines(0)[-1].world == 1, "one rank")
        run.until(lambda: sum(n["Alive"] for n in ray.nodes()) == 2, "Ray's notice")
        cluster.add_node(resources={"fast": 1}, **NODE)
        run.trains([2])
        assert run.stop()["world"] == 2
    check_counts(run, "sync", 2)


DRIVER = """
import sys
import ray
import elche.ray
from tests.harness.waiting import is_running
from tests.ray.cases.counted import count

_, address, folder, checkpoints, *kinds = sys.argv
ray.init(address=address)
try:
    elche.ray.run(
        count,
        [elche.ray.RankSpec(resources={"CPU": 0.5, kind: 0.5}) for kind in kinds],
        args=(folder, "sync"),
        speeds=(1.0, 1.0),
        checkpoint_dir=checkpoints or None,
    )
except KeyboardInterrupt:
    print("interrupted")
"""


@contextmanager
def driving(cluster: Any, *words: object) -> Iterator[subprocess.Popen[str]]:
    """Runs `count` from a driver of its own, which gets signals."""
    command = (sys.executable, "-c", DRIVER, cluster.address, *map(str, words))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def test_ctrl_c_ends_all_ranks(cluster: Any, tmp_path: Path) -> None:
    with driving(cluster, tmp_path, "", "CPU", "CPU") as driver:
        run = Counted(tmp_path, Future())
        run.trains([0, 1])
        driver.send_signal(signal.SIGINT)
        said, _ = driver.communicate(timeout=WAIT_S)
    assert "interrupted" in said
    assert not run.held()


def test_sigterm_makes_a_last_checkpoint(cluster: Any, tmp_path: Path) -> None:
    """Also while the replacement of a rank waits for a node."""
    saved = tmp_path / "checkpoints"
    with (
        nodes(cluster, "near", "far") as there,
        driving(cluster, tmp_path, saved, "near", "far") as driver,
    ):
        run = Counted(tmp_path, Future())
        run.trains([0, 1])
        cluster.remove_node(there["far"], allow_graceful=False)
        run.until(lambda: run.lines(0)[-1].world == 1, "one rank")
        driver.send_signal(signal.SIGTERM)
        driver.communicate(timeout=WAIT_S)
    assert driver.returncode == 128 + signal.SIGTERM
    assert [*saved.glob("*/manifest.json")]
    assert not run.held()


def fails_on_rank_1() -> None:
    import elche

    if elche.rank() == 1:
        raise ValueError("bad luck")
    threading.Event().wait(60.0)


def test_errors_come_to_the_driver(cluster: Any) -> None:
    cpu = elche.ray.RankSpec(resources={"CPU": 0.5})
    with pytest.raises(RemoteRankError, match="rank 1 failed: ValueError: bad luck"):
        elche.ray.run(fails_on_rank_1, [cpu, cpu])
    nowhere = elche.ray.RankSpec(label_selector={"kind": "unicorn"})
    with pytest.raises(RemoteRankError, match=r"and labels .*unicorn"):
        elche.ray.run(fails_on_rank_1, [nowhere], start_timeout_s=1.0)
    with pytest.raises(ConfigError, match="at least one RankSpec"):
        elche.ray.run(fails_on_rank_1, [])
    hinted = elche.ray.RankSpec(speed_hint=2.0)
    with pytest.raises(ConfigError, match="a speed_hint of every rank or of none"):
        elche.ray.run(fails_on_rank_1, [cpu, hinted])


def test_labels_choose_the_node(cluster: Any) -> None:
    """One that comes later: a line names what is waited for."""
    ranks = [elche.ray.RankSpec(label_selector={"kind": "late"})]
    with nodes(cluster, "early"), ThreadPoolExecutor(1) as pool:
        found = pool.submit(elche.ray.run, os.getenv, ranks, args=("ELCHE_HOST",))
        late = cluster.add_node(labels={"kind": "late"}, **NODE)
        assert found.result(WAIT_S) == late.node_id


def test_parameters_equal_those_of_one_device(cluster: Any) -> None:
    cpu = elche.ray.RankSpec(resources={"CPU": 0.5})
    task = Task(dtype="float64", epochs=3)
    trace = elche.ray.run(shared, [cpu, cpu], args=(task,), speeds=(1.0, 0.5))
    assert difference(trace.state, plain(task).state) < 1e-12
    own = sum(map(sum, trace.batch_sizes))
    assert 0 < own < task.epochs * task.samples, trace.batch_sizes  # a share


def test_a_script_counts_each_position_once(cluster: Any, tmp_path: Path) -> None:
    script = Path(__file__).parent / "cases" / "counted.py"
    (tmp_path / "stop").write_text("3")
    cpu = elche.ray.RankSpec(resources={"CPU": 0.5})
    assert elche.ray.run(str(script), [cpu, cpu], args=(tmp_path, "sync")) is None
    check_counts(Counted(tmp_path, Future()), "sync", 2)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rank", "node"])
def test_what_falls_silent_is_given_up(cluster: Any, tmp_path: Path, what: str) -> None:
    """A node's raylet, actor and rank stop, or a rank alone; they continue too late."""
    with (
        nodes(cluster, "fast", "slow") as there,
        counting(
            tmp_path,
            "sync",
            ranks=specs(["fast", "slow"]),
            rejoin=int(what == "rank"),
            environment=EMULATED,
        ) as run,
    ):
        run.trains([0, 1])
        own = run.lines(1)[0].pid
        raylet = there["slow"].all_processes["raylet"][0].process.pid
        stopped = [own] if what == "rank" else descendants(raylet)
        try:
            send(signal.SIGSTOP, stopped)
            stopped_s = time.monotonic()
            silent_s = run.trains([0], stopped_s + 0.5)
            if what == "rank":
                run.trains([2])
            send(signal.SIGCONT, stopped)
            run.until(lambda: not is_running(own), "the end of rank 1")
            world = 1 + (what == "rank")
            assert run.stop()["world"] == world
        finally:
            send(signal.SIGKILL, stopped)
    print(f"seconds until the survivor trains beside a silent {what}:", silent_s)
    check_counts(run, "sync", world)


def send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(pids: Sequence[int]) -> None:
    send(signal.SIGKILL, pids)


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for each in threads for child in each.read_text().split()]
    return [pid, *(each for child in children for each in descendants(child))]
