"""The study at equal global batch: a star around four unequal ranks.

Every rank takes local steps on its part of the one device's batch, as elche trains.
Where a trial is not tuned it takes the learning rate that is best for one device, or at
eight ranks twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.convergence.method import FLEETS, Method
from benchmarks.convergence.results import Setting
from benchmarks.convergence.search import Trial

SEEDS = 3
BATCHES = 2000
RATE = 4e-3
ALONE: dict[int, float] = {
    300: 2.4902,
    500: 2.3475,
    750: 2.2663,
    1000: 2.2073,
    1500: 2.1255,
    2000: 2.0616,
    3000: 1.9760,
    4000: 1.9160,
    5000: 1.8666,
    6000: 1.8277,
    8000: 1.7694,
    12_000: 1.7011,
    16_000: 1.6474,
}
"""Loss of one device with AdamW by the length of its run, each with its own schedule
and tuned learning rate: means of four seeds, eight at 8000 (2026-11-21 and 22)."""


def nesterov(outer_lr: float) -> dict[str, Any]:
    """Settings of elche's default outer step."""
    return {"outer": "nesterov", "outer_lr": outer_lr, "outer_momentum": 0.5}


def windows(fleet: str, centre: float = RATE, **settings: Any) -> Trial:
    """Ranks that take local steps on a part of the one device's batch."""
    cut = len(FLEETS[fleet])
    return alone(centre, fleet=fleet, cut=cut, **settings)


def alone(
    centre: float = RATE, *, seeds: int = SEEDS, batches: int = BATCHES, **settings: Any
) -> Trial:
    """A trial of the text task; of one device unless the settings name a fleet."""
    return Trial(Setting("text", batches, Method(**settings)), centre, seeds)


def untuned(*trials: Trial) -> list[Trial]:
    """The same at one learning rate each."""
    return [replace(trial, tuned=False) for trial in trials]


TWO: dict[str, Any] = {"fleet": "2", "seeds": 2, **nesterov(0.7)}
FOUR: dict[str, Any] = {"fleet": "4", **nesterov(1.0)}
EIGHT: dict[str, Any] = {"fleet": "8", "centre": 2 * RATE, "seeds": 2, **nesterov(1.0)}


def ranks() -> list[Trial]:
    """One device, and 2, 4 and 8 ranks with both outer steps, each tuned."""
    fleets = (("4", 1.0), ("2", 0.7), ("8", 1.0))
    trials = [alone(seeds=4)]
    for fleet, outer_lr in fleets:
        trials += [windows(fleet), windows(fleet, **nesterov(outer_lr))]
    return trials


def star() -> list[Trial]:
    """Anchor, lag and codec, one at a time."""
    return untuned(
        windows(**FOUR, anchor=5),
        windows(**FOUR, anchor=20),
        windows(**FOUR, lag=2),
        windows(**FOUR, lag=-1),
        windows(**FOUR, anchor=5, lag=4),
        windows(**FOUR, anchor=5, lag=-1),
        windows(**FOUR, codec="int8", seeds=2),
        windows(**FOUR, codec="int4", seeds=2),
        *(
            windows(**ends, anchor=anchor)
            for ends in (TWO, EIGHT)
            for anchor in (5, 20)
        ),
        *(windows(**ends, anchor=5, lag=-1) for ends in (TWO, EIGHT)),
        windows(**EIGHT, lag=2),
    )


def many() -> list[Trial]:
    """Outer momentum on four and eight ranks, a whole lag on eight; anchor 5."""
    eight: dict[str, Any] = EIGHT | {"seeds": 3, "anchor": 5}
    slow: dict[str, Any] = eight | {"centre": RATE}
    return untuned(
        windows(**eight),
        windows(**slow),
        windows(**slow, lag=-1),
        windows(**FOUR | {"outer_momentum": 0.65}, anchor=5),
        windows(**slow | {"outer_momentum": 0.75}),
    )


def lengths() -> list[Trial]:
    """Runs of 500 and 8000 batches."""
    trials = []
    for batches, centre in ((500, 6.4e-3), (8000, RATE)):
        at: dict[str, Any] = {"batches": batches, "centre": centre}
        trials += [
            alone(**at),
            windows(**FOUR | at),
            windows(**TWO | at),
            windows(**EIGHT | {"batches": batches}),
            windows(**FOUR | at, anchor=5, seeds=2),
        ]
    return untuned(*trials)


def of_optimizer(optimizer: str, centre: float) -> list[Trial]:
    """One device, four and eight ranks, tuned; and shorter runs of one device."""
    at: dict[str, Any] = {"optimizer": optimizer, "centre": centre}
    return [
        alone(**at),
        windows(**FOUR | at),
        windows(**EIGHT | at),
        *untuned(*(alone(**at, batches=n, seeds=2) for n in (1000, 1500))),
    ]


STUDIES: dict[str, Callable[[], list[Trial]]] = {
    "ranks": ranks,
    "star": star,
    "muon": lambda: of_optimizer("muon", RATE),
    "lengths": lengths,
    "many": many,
    "sgd": lambda: of_optimizer("sgd", 0.2),
}
