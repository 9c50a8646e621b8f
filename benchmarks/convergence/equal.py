"""The study at equal global batch: a star around four unequal ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.convergence.method import FLEETS
from benchmarks.convergence.search import Trial
from benchmarks.convergence.study import nesterov, text, untuned

SEEDS = 3
BATCHES = 2000


def windows(fleet: str, centre: float, **settings: Any) -> Trial:
    """Ranks that take local steps on a part of the one device's batch."""
    fixed = {"batches": BATCHES, "seeds": SEEDS, "state": "local"} | settings
    return text(centre, fleet=fleet, cut=len(FLEETS[fleet]), **fixed)


def ranks() -> list[Trial]:
    """One device, and 2, 4 and 8 ranks; both outer steps, each tuned."""
    return [
        text(4e-3, batches=BATCHES, seeds=4),
        windows("4 unequal", 4e-3),
        windows("4 unequal", 4e-3, **nesterov(1.0)),
        windows("1:4", 4e-3),
        windows("1:4", 4e-3, **nesterov(0.7)),
        windows("8 mixed", 4e-3),
        windows("8 mixed", 4e-3, **nesterov(1.0)),
    ]


def star() -> list[Trial]:
    """One factor at a time, around four ranks; at the one device's learning rate."""
    base: dict[str, Any] = {"fleet": "4 unequal", "centre": 4e-3, **nesterov(1.0)}
    ends: list[dict[str, Any]] = [
        {"fleet": "1:4", "centre": 4e-3, "seeds": 2, **nesterov(0.7)},
        {"fleet": "8 mixed", "centre": 8e-3, "seeds": 2, **nesterov(1.0)},
    ]
    return untuned(
        windows(**base, anchor=5),
        windows(**base, anchor=20),
        windows(**base, anchor=5, state="average"),
        windows(**base, anchor=20, state="average"),
        windows(**base, lag=2),
        windows(**base, lag=-1),
        windows(**base, anchor=5, lag=4),
        windows(**base, anchor=5, lag=-1),
        windows(**base | {"codec": "int8", "seeds": 2}),
        windows(**base | {"codec": "int4", "seeds": 2}),
        *(windows(**each, anchor=anchor) for each in ends for anchor in (5, 20)),
        *(windows(**each, anchor=5, lag=-1) for each in ends),
        windows(**ends[1], lag=2),
    )


def lengths() -> list[Trial]:
    """Runs of 500 and 8000 batches."""
    rates = {500: 6.4e-3, 8000: 4e-3}
    trials = []
    for batches, lr in rates.items():
        at: dict[str, Any] = {"batches": batches}
        trials += [
            text(lr, seeds=3, **at),
            windows("4 unequal", lr, **at, **nesterov(1.0)),
            windows("1:4", lr, seeds=2, **at, **nesterov(0.7)),
            windows("8 mixed", 8e-3, seeds=2, **at, **nesterov(1.0)),
            windows("4 unequal", lr, anchor=5, seeds=2, **at, **nesterov(1.0)),
        ]
    return untuned(*trials)


def muon() -> list[Trial]:
    """Muon for the hidden matrices."""
    at: dict[str, Any] = {"optimizer": "muon", "batches": BATCHES}
    return [
        text(4e-3, seeds=3, **at),
        windows("4 unequal", 4e-3, **at, **nesterov(1.0)),
        windows("8 mixed", 4e-3, **at | {"seeds": 2}, **nesterov(1.0)),
        *untuned(
            text(4e-3, **at | {"batches": 1000}),
            text(4e-3, **at | {"batches": 1500}),
        ),
    ]


def sgd() -> list[Trial]:
    """SGD with momentum 0.9."""
    at: dict[str, Any] = {"optimizer": "sgd", "batches": BATCHES}
    return [
        text(0.2, seeds=3, **at),
        windows("4 unequal", 0.2, **at, **nesterov(1.0)),
        windows("8 mixed", 0.2, **at | {"seeds": 2}, **nesterov(1.0)),
        *untuned(
            text(0.2, **at | {"batches": 1000}), text(0.2, **at | {"batches": 1500})
        ),
    ]


STUDIES: dict[str, Callable[[], list[Trial]]] = {
    "ranks": ranks,
    "star": star,
    "lengths": lengths,
    "muon": muon,
    "sgd-equal": sgd,
}
