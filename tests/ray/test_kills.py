"""Seeded kills on Ray: what dies and when; beside it Ray Train's restarts of all.

`pytest -s tests/ray/test_kills.py`: 50 kills, and Ray Train's 2; it prints seconds.
Nodes have network namespaces, whose links are cut; one of them has two ranks.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ray.cases.driving import NODES
from tests.ray.conftest import own_processes
from tests.ray.separate_nodes import SeparateNodes, separate_nodes
from tests.ray.test_cluster_run import LIMIT_S, Counted, check_counts

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S),
]

PHASES = "forward", "backward", "reduction"
"""Of a batch, in which a rank's process is killed."""
QUICK = (*PHASES, "coordinator", "node")
"""Faults that end what is under way; beside others that batch may still end."""
NODE_FAULTS = "node", "silent node", "cut link"
FAULTS = (*QUICK, "silent node", "cut link", "link cut for 5 s")
KILLS = random.Random(0).sample(FAULTS, counts=[8] * 5 + [4, 3, 3], k=50)
PER_RUN = 10
RANKS = 4
FIGURES: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
"""Seconds until the slowest survivor's next batch, its longest pause between two until
the replacement's first, and until that."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[SeparateNodes]:
    with separate_nodes() as made:
        yield made
    for (who, fault), rows in sorted(FIGURES.items()):
        columns = [
            f"{statistics.median(column):.2f} ({max(column):.2f})"
            for column in zip(*rows, strict=True)
        ]
        print(f"| {who} | {fault} | {len(rows)} |", " | ".join(columns), "|")


def lives(pid: int) -> bool:
    """False for a zombie, which its node's end may leave to this process."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return ") Z" not in stat.read_text()
    except OSError:
        return False


@dataclass(frozen=True)
class Faults:
    """Injects faults into a run.

    Attributes:
        nodes: where it runs.
        run: that is disturbed.
        draws: of victims and moments.
    """

    nodes: SeparateNodes
    run: Counted
    draws: random.Random

    def ranks(self, since_s: float = 0.0) -> dict[int, int]:
        """Process ids of living ranks that have trained since then."""
        logged = [int(p.stem[5:]) for p in self.run.folder.glob("rank-*.log")]
        last = {rank: lines[-1] for rank in logged if (lines := self.run.lines(rank))}
        return {
            rank: line.pid
            for rank, line in last.items()
            if line.at_s > since_s and lives(line.pid)
        }

    def inject(self, fault: str) -> tuple[float, float, float]:
        """A fault, and its end; for survivors the seconds of `FIGURES`."""
        self.run.trains([*self.ranks()], time.monotonic() + self.draws.uniform(0, 2))
        before, node = self.ranks(), self.draws.randrange(len(NODES))
        gone = self.nodes.pids(node) if fault in NODE_FAULTS else []
        since_s, beat_s = time.monotonic(), 0.0 if fault in QUICK else 0.5
        if fault == "node":
            self.nodes.kill(node)
        elif fault == "silent node":
            for pid in gone:
                os.kill(pid, signal.SIGSTOP)
        elif fault == "coordinator":
            found = own_processes().items()
            (pid,) = (pid for pid, text in found if "serving" in text)
            os.kill(pid, signal.SIGKILL)
        elif "link" in fault:
            self.nodes.link.turn(node, "down")
            if fault not in NODE_FAULTS:
                time.sleep(5.0)
                self.nodes.link.turn(node, "up")
        else:
            gone = [before[rank := self.draws.choice([*before])]]
            since_s = self.kill(rank, f"{fault} {self.draws.uniform(0, 0.002)}")
        alive = [rank for rank, pid in before.items() if pid not in gone]
        next_s = self.run.trains(alive, since_s + beat_s) + beat_s
        if fault == "cut link":
            lost = [pid for pid in before.values() if pid in gone]
            self.run.until(lambda: not any(map(lives, lost)), "its ranks' own end")
            print(f"ranks ended {time.monotonic() - since_s:.1f} s after the cut")
        if fault in NODE_FAULTS:
            self.renew(node)
        self.run.until(lambda: len(self.ranks(since_s)) == RANKS, "all ranks")
        new = sorted(self.ranks(since_s).keys() - before.keys())
        assert bool(new) == (fault in PHASES + NODE_FAULTS), (fault, new)
        whole_s = self.run.trains(new, since_s) if new else 2.0
        self.run.trains(alive, since_s + whole_s)
        times = [[line.at_s for line in self.run.lines(rank)] for rank in alive]
        pauses = [
            later - earlier
            for own in times
            for earlier, later in itertools.pairwise(own)
            if since_s < later and earlier < since_s + whole_s
        ]
        return next_s, max(pauses), whole_s if new else next_s

    def renew(self, node: int) -> None:
        """Starts a node again, in its namespace."""
        self.nodes.kill(node)
        self.nodes.link.turn(node, "up")
        assert self.nodes.start(node).wait(120.0) == 0

    def kill(self, rank: int, wish: str) -> float:
        """Has a rank die in a phase of a batch; when it did."""
        path = self.run.folder / f"die-{rank}"
        path.with_suffix(".new").write_text(wish)
        path.with_suffix(".new").rename(path)
        died = self.run.folder / f"died-{rank}"
        self.run.until(lambda: died.exists() and died.read_text() != "", "the death")
        since_s = float(died.read_text())
        died.unlink()
        return since_s


@pytest.mark.parametrize("number", range(len(KILLS) // PER_RUN))
def test_a_run_survives_kills_at_random_moments(
    nodes: SeparateNodes, tmp_path: Path, number: int
) -> None:
    policy = ("sync", "async")[number % 2]
    with nodes.drive("elche", tmp_path, policy) as run:
        run.trains(range(RANKS))
        faults = Faults(nodes, run, random.Random(number))
        for fault in KILLS[number * PER_RUN :][:PER_RUN]:
            seconds = faults.inject(fault)
            FIGURES[policy, fault].append(seconds)
            print(policy, fault, seconds)
        run.until(lambda: run.lines(max(faults.ranks()))[-1].world == RANKS, "ranks")
        assert run.stop() == 0
    check_counts(run, policy, RANKS)


@pytest.mark.parametrize("fault", ["backward", "node"])
def test_ray_train_restarts_all_after_the_same_kills(
    nodes: SeparateNodes, tmp_path: Path, fault: str
) -> None:
    with nodes.drive("train", tmp_path, "sync") as run:
        run.trains(range(RANKS))
        faults = Faults(nodes, run, random.Random(0))
        run.trains(range(RANKS), time.monotonic() + 2.0)  # a checkpoint's time
        before = faults.ranks()
        if fault == "node":
            since_s = time.monotonic()
            faults.renew(faults.draws.randrange(len(NODES)))
        else:
            since_s = faults.kill(faults.draws.randrange(RANKS), "backward 0.001")

        at_s = restarted(run, {*before.values()})
        FIGURES["Ray Train", fault].append((at_s - since_s,))
        assert run.stop() == 0
    check_counts(run, "sync", RANKS)


def restarted(run: Counted, gone: set[int]) -> float:
    """Waits until all ranks have trained in new processes; since when they have."""

    def new() -> list[float]:
        found = [run.lines(rank) for rank in range(RANKS)]
        return [lines[0].at_s for lines in found if lines and lines[0].pid not in gone]

    run.until(lambda: len(new()) == RANKS, "a restart of all")
    return max(new())
