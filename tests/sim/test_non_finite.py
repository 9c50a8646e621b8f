"""Batches that give no number, in simulated windows: they alone are left out."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from elche.coordination.events import BatchesDone, Event, WindowClosed
from elche.coordination.instructions import EndEpoch, GrantBatches
from elche.coordination.suspects import Suspects
from elche.coordination.window_loop import WindowLoop
from elche.sim.cluster import Cluster, Device, Link, Run
from elche.sim.simulation import Simulation, Watch
from elche.sim.window_worker import WindowEpoch

BATCHES = 120


class Learned:
    """What a rank has learned, whose loop steps every so many batches.

    Attributes:
        model: batches that steps were taken along.
        gradients: batches whose gradients wait for a step.
    """

    def __init__(self, bad: set[int], accumulated: int) -> None:
        self._bad = bad
        self._accumulated = accumulated
        self._trained = 0
        self._kept: list[int] = []
        self._sent: list[int] = []
        self.model: list[int] = []
        self.gradients: list[int] = []
        self.has_stepped = False

    @property
    def is_finite(self) -> bool:
        return not self._bad & set(self.model)

    @property
    def has_finite_gradients(self) -> bool:
        return not self._bad & set(self.gradients)

    @property
    def accumulates(self) -> bool:
        return self._accumulated > 1

    def train(self, batch: int) -> None:
        self._trained += 1
        self.gradients.append(batch)
        self.has_stepped = self._trained % self._accumulated == 0
        if self.has_stepped:
            self.model += self.gradients
            self.gradients = []

    def keep(self) -> None:
        self._kept = list(self.model)

    def restore(self, batches: int) -> None:
        self.model, self.gradients = list(self._kept), []

    def drop_gradients(self, batches: int) -> None:
        self.gradients = []

    def forget(self) -> None: ...

    def close(self) -> bool:
        """The window ends; what is no number is not sent, and not kept either."""
        is_finite = self.is_finite
        if not is_finite:
            self.model, self.gradients = list(self._sent), []
        self._sent = list(self.model)
        return is_finite


class Poisoned:
    """Ranks of a simulation whose data hold some batches that give no number."""

    def __init__(
        self, bad: set[int], accumulated: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._bad = bad
        self._accumulated = accumulated
        self._learned: dict[int, Learned] = {}
        self._suspects: dict[int, Suspects] = {}
        self._is_finite = True
        self.tried: list[int] = []
        self.left_out: list[int] = []
        self.samples = 0
        send, handle, closed = Simulation.send, WindowEpoch._handle, WindowLoop.closed
        me = self

        def send_spoilt(sim: Simulation, event: Event) -> None:
            send(sim, me.spoilt(event))

        def hear(worker: WindowEpoch, instruction: Any) -> None:
            me.hear(instruction)
            handle(worker, instruction)

        def close(loop: WindowLoop, now_s: float) -> None:
            closed(loop, now_s, is_finite=me._is_finite)

        monkeypatch.setattr(Simulation, "send", send_spoilt)
        monkeypatch.setattr(WindowEpoch, "_handle", hear)
        monkeypatch.setattr(WindowLoop, "closed", close)

    def hear(self, instruction: Any) -> None:
        if isinstance(instruction, GrantBatches):
            self._of(instruction.rank)[1].add(instruction.suspects)
        if isinstance(instruction, EndEpoch) and instruction.rank == 0:
            self.left_out = [b for part in instruction.left_out for b in range(*part)]
            self.samples = sum(instruction.samples)

    def spoilt(self, event: Event) -> Event:
        if isinstance(event, BatchesDone):
            learned, suspects = self._of(event.rank)
            for batch in range(event.start, event.stop):
                self.tried.append(batch)
                suspects.begin(batch)
                learned.train(batch)
                suspects.done(batch)
        if isinstance(event, WindowClosed):
            learned, suspects = self._of(event.rank)
            culprits, rejected = suspects.window_ends()
            self._is_finite = learned.close()
            lost = suspects.closed(is_finite=self._is_finite)
            return replace(
                event,
                is_finite=self._is_finite,
                culprits=culprits,
                rejected=rejected,
                lost=lost,
            )
        return event

    @property
    def learned(self) -> list[int]:
        """Batches in all ranks' models, or in gradients that wait."""
        every = self._learned.values()
        return [b for each in every for b in (*each.model, *each.gradients)]

    def _of(self, rank: int) -> tuple[Learned, Suspects]:
        learned = self._learned.setdefault(rank, Learned(self._bad, self._accumulated))
        return learned, self._suspects.setdefault(rank, Suspects(learned))


def cluster_of(policy: str, seed: int, **options: Any) -> Cluster:
    run = Run(
        policy=policy,
        samples=8 * BATCHES,
        batch_size=8,
        model_bytes=1e6,
        seed=seed,
        options={"anchor": 3, "non_finite": "leave_out", **options},
    )
    return Cluster(
        run=run,
        devices=tuple(
            Device(seconds_per_sample=s, jitter=0.3) for s in (0.001, 0.0017, 0.004)
        ),
        link=Link(latency_s=0.0005, spread_s=0.003),
    )


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("seed", "accumulated"), [*enumerate([1, 1, 1, 1, 3, 4, 5])])
def test_they_alone_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    deterministic: bool,
    seed: int,
    accumulated: int,
) -> None:
    """Each is tried twice at least; every other batch is in the model, once."""
    draw = random.Random(seed)
    bad = set(draw.sample(range(BATCHES), draw.choice([1, 2, 5, 20])))
    bad |= {BATCHES - 1} if seed % 2 else set()
    poisoned = Poisoned(bad, accumulated, monkeypatch)
    cluster = cluster_of(policy, seed, deterministic=deterministic)
    sim = Simulation(cluster, Watch(checks=True))
    sim.books = None  # they know of no contribution that is rejected
    sim.run()
    assert not sim.history.aborts, next(iter(sim.history.aborts.values())).reason
    assert sorted(poisoned.left_out) == sorted(bad)
    assert sorted(poisoned.learned) == sorted(set(range(BATCHES)) - bad)
    assert poisoned.samples == 8 * (BATCHES - len(bad))
    assert all(poisoned.tried.count(batch) >= 2 for batch in bad)
