"""Studies of what may close the gap at eight ranks, of long windows and a larger model.

What they found is in `docs/convergence.md`, what failed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.convergence.method import Method
from benchmarks.convergence.results import Setting
from benchmarks.convergence.search import Trial
from benchmarks.convergence.study import (
    FINAL_SEEDS,
    LONG,
    TEXT_BATCHES,
    nesterov,
    text,
    untuned,
)

LARGE = "text 480"
LARGE_WIDTH = 480
LARGE_BATCHES = 3000
SHORT: dict[str, Any] = {"fleet": "8 mixed", "anchor": 1, "lag": 2, "state": "local"}
LATE: dict[str, Any] = {"fleet": "8 mixed", "anchor": 5, "lag": 4, "state": "local"}
LOCAL: dict[str, Any] = {"fleet": "8 mixed", "anchor": 5, "state": "local"}


def phases() -> list[Trial]:
    """Eight ranks: a beginning or an end in common steps or shorter windows."""
    usual = nesterov(1.0)
    return untuned(
        *(text(8e-3, first_sync=part, **usual, **SHORT) for part in (0.05, 0.1, 0.2)),
        *(text(8e-3, last_sync=part, **usual, **SHORT) for part in (0.1, 0.2)),
        text(8e-3, first_sync=0.1, last_sync=0.1, **usual, **SHORT),
        *(text(8e-3, first_sync=part, **usual, **LATE) for part in (0.1, 0.2)),
        *(text(8e-3, last_sync=part, **usual, **LATE) for part in (0.1, 0.2)),
        text(8e-3, last_anchor=1, **usual, **LATE),
        text(8e-3, first_anchor=1, last_anchor=1, **usual, **LATE),
        text(8e-3, first_sync=0.1, last_anchor=1, **usual, **LATE),
        text(8e-3, first_sync=0.1, first_anchor=1, **usual, **LATE),
        text(8e-3, first_sync=0.4, **usual, **LATE),
        text(8e-3, first_sync=0.4, **usual, **SHORT),
    )


def growing() -> list[Trial]:
    """Windows that lengthen as the learning rate falls.

    With a power of 2 (arXiv:2310.14423) a run has 2.5 times fewer windows than without,
    with 1 half as many.
    """
    usual = nesterov(1.0)
    eight: dict[str, Any] = {"fleet": "8 mixed", "lag": 4, "state": "local", **usual}
    four: dict[str, Any] = {"fleet": "1:1:2:4", "lag": 4, "state": "local", **usual}
    seeds = {"seeds": FINAL_SEEDS}
    return untuned(
        text(8e-3, anchor=2, growth=2.0, **eight, **seeds),
        text(8e-3, growth=2.0, **usual, **SHORT, **seeds),
        text(8e-3, anchor=2, growth=1.0, **eight),
        text(8e-3, growth=1.0, **usual, **SHORT),
        text(8e-3, first_sync=0.2, growth=2.0, **usual, **SHORT),
        text(6e-3, anchor=2, growth=2.0, **four, **seeds),
    )


def grown() -> list[Trial]:
    """Growing windows beside fixed ones, as many of them, at one lag of 2.

    A run of 8000 batches has, at eight ranks and anchors 1, 2 and 4, 363, 181 and 90
    windows; growing from anchor 1 it has 204 with power 1 and 177 with 1.5, from
    anchor 2 97. At four ranks it is 727, 363 and 181, and 411, 356 and 196.
    """
    usual = nesterov(1.0)
    shapes: tuple[dict[str, Any], ...] = (
        {"anchor": 1},
        {"anchor": 1, "growth": 1.0},
        {"anchor": 1, "growth": 1.5},
        {"anchor": 2},
        {"anchor": 2, "growth": 1.0},
        {"anchor": 4},
    )
    return untuned(
        *(
            text(lr, fleet=fleet, lag=2, state="local", seeds=4, **usual, **shape)
            for fleet, lr in (("8 mixed", 8e-3), ("1:1:2:4", 6e-3))
            for shape in shapes
        )
    )


def openings() -> list[Trial]:
    """A first fifth in the steps that elche's `sync` takes: of one batch.

    At the learning rate of one device, and at higher ones.
    """
    usual: dict[str, Any] = {"state": "local", "seeds": 4, **nesterov(1.0)}
    parts: list[dict[str, Any]] = [{}, {"first_sync": 0.2, "first_batches": 1}]
    averaged = usual | {"state": "average"}
    windows = [
        *(
            (fleet, anchor, lag, usual)
            for fleet in ("8 mixed", "1:1:2:4")
            for anchor, lag in ((1, 2), (5, 4), (20, 4))
        ),
        *((fleet, 5, 0, averaged) for fleet in ("8 mixed", "1:1:2:4")),
    ]
    return untuned(
        *(
            text(4e-3, fleet=fleet, anchor=anchor, lag=lag, **part, **more)
            for fleet, anchor, lag, more in windows
            for part in parts
        ),
        *(
            text(5.6e-3, fleet="8 mixed", anchor=anchor, lag=lag, **part, **usual)
            for anchor, lag in ((1, 2), (5, 4))
            for part in parts
        ),
    )


def warm_ups() -> list[Trial]:
    """Does a longer warm-up of the learning rate what common steps do?"""
    usual = nesterov(1.0)
    return untuned(
        text(4e-3, warm_up=0.2, seeds=FINAL_SEEDS),
        text(8e-3, warm_up=0.2, batches_per_step=8, seeds=FINAL_SEEDS),
        text(8e-3, warm_up=0.2, codec="int4", **usual, **SHORT, seeds=FINAL_SEEDS),
        *(text(8e-3, warm_up=part, **usual, **SHORT) for part in (0.1, 0.2)),
        *(text(8e-3, warm_up=part, **usual, **LATE) for part in (0.1, 0.2)),
        text(8e-3, warm_up=0.2, first_sync=0.2, **usual, **SHORT),
        text(8e-3, warm_up=0.2, first_sync=0.2, **usual, **LATE),
    )


def begun() -> list[Trial]:
    """More seeds of runs that begin with common steps."""
    usual, seeds = nesterov(1.0), {"seeds": FINAL_SEEDS}
    four: dict[str, Any] = {"fleet": "1:1:2:4", "state": "local", **usual}
    two: dict[str, Any] = {"fleet": "1:4", "state": "local", **nesterov(0.7)}
    return untuned(
        text(8e-3, first_sync=0.2, codec="int4", **usual, **SHORT, **seeds),
        text(8e-3, first_sync=0.1, codec="int4", **usual, **SHORT, **seeds),
        text(8e-3, first_sync=0.2, **usual, **LATE, **seeds),
        text(6e-3, first_sync=0.2, anchor=1, lag=2, **four, **seeds),
        text(6e-3, first_sync=0.2, anchor=5, lag=4, **four, **seeds),
        text(4e-3, anchor=5, lag=4, **two, **seeds),
        text(4e-3, first_sync=0.2, anchor=5, lag=4, **two, **seeds),
        text(8e-3, batches=LONG, first_sync=0.1, **usual, **SHORT),
        text(8e-3, batches=LONG, first_sync=0.1, **usual, **LATE),
        text(8e-3, batches=LONG, first_sync=0.2, **usual, **LATE),
    )


def steps() -> list[Trial]:
    """Eight ranks: schedules of the outer and the inner step, the second moment."""
    usual = nesterov(1.0)
    return untuned(
        *(text(8e-3, fade=part, **usual, **SHORT) for part in (0.2, 0.5, 1.0)),
        text(8e-3, fade=0.2, **usual, **LATE),
        text(8e-3, fade=1.0, **usual, **LATE),
        *(text(lr, **{**LOCAL, "state": "second"}, **usual) for lr in (8e-3, 1.28e-2)),
        *(text(lr, rewarm=4, **LOCAL, **usual) for lr in (8e-3, 1.28e-2)),
        text(8e-3, anchor=2, lag=4, fleet="8 mixed", state="local", **usual),
        text(8e-3, anchor=2, lag=4, fleet="8 mixed", state="late", **usual),
    )


def partial() -> list[Trial]:
    """Eight ranks that go part of the way to the mean at every synchronisation.

    To be compared, at the same bytes, with those that go the whole way (`mix` 1 here,
    and the studies `sparse` and `eight`).
    """
    usual = nesterov(1.0)
    blocking: dict[str, Any] = {**SHORT, "lag": 0}
    return [
        *(text(1.28e-2, mix=part, **blocking) for part in (1.0, 0.5)),
        text(8e-3, mix=0.5, **SHORT, **usual),
        *untuned(
            text(8e-3, mix=0.5, **blocking, **usual),
            *(text(8e-3, mix=part, **LATE, **usual) for part in (0.75, 0.5)),
            *(text(8e-3, mix=part, **SHORT, **usual) for part in (0.75, 0.25)),
            text(8e-3, mix=0.5, **LOCAL, **usual),
        ),
    ]


def averages() -> list[Trial]:
    """Is Nesterov more than a larger learning rate? Both tuned, windows short."""
    eight: dict[str, Any] = {"fleet": "8 mixed", "state": "local"}
    four: dict[str, Any] = {"fleet": "1:1:2:4", "lag": 2, "state": "local"}
    usual, mild, seeds = nesterov(1.0), nesterov(1.0, 0.25), {"seeds": 4}
    return [
        text(1.28e-2, **eight, **seeds),
        text(8e-3, **eight, **usual, **seeds),
        text(1.28e-2, lag=2, **eight, **seeds),
        text(8e-3, lag=2, **eight, **usual, **seeds),
        text(9.6e-3, **four, **seeds),
        text(6e-3, **four, **usual, **seeds),
        text(1.28e-2, anchor=5, lag=4, **eight, **seeds),
        text(1.28e-2, **eight, **mild),
        text(1e-2, lag=2, **eight, **mild),
        text(8e-3, **four, **mild),
        *untuned(
            text(1.28e-2, first_sync=0.2, **eight, **seeds),
            text(9.6e-3, first_sync=0.2, **four, **seeds),
        ),
    ]


def dense() -> list[Trial]:
    """Compressed gradients at every common step of eight batches, error-fed."""
    every: dict[str, Any] = {"batches_per_step": 8}
    return [
        *untuned(
            text(8e-3, top=0.1, **every),
            text(8e-3, top=0.01, **every),
            text(8e-3, codec="int8", **every),
            text(8e-3, codec="int4", **every),
            text(5e-3, codec="int4", delay=1, **every),
        ),
        text(5e-3, top=0.01, **every),
    ]


def hundred() -> list[Trial]:
    """Anchor 100: windows of 500, 1100 and 2200 batches."""
    fleets = (("1:4", 4e-3), ("1:1:2:4", 6e-3), ("8 mixed", 8e-3))
    usual = nesterov(1.0)
    return [
        *(
            text(lr, anchor=100, fleet=fleet, state="local", **step)
            for fleet, lr in fleets
            for step in (usual, {})
        ),
        *untuned(
            *(text(lr, anchor=100, fleet=fleet, **usual) for fleet, lr in fleets),
            *(
                text(lr, anchor=100, fleet=fleet, lag=4, state="local", **usual)
                for fleet, lr in fleets
            ),
        ),
        text(4e-3, anchor=100, fleet="1:4", state="local", **nesterov(0.7)),
    ]


def large() -> list[Trial]:
    """A million parameters: one device, DDP, then eight and four ranks."""

    def trial(centre: float, **settings: Any) -> Trial:
        return Trial(Setting(LARGE, LARGE_BATCHES, Method(**settings)), centre)

    def shorter(batches: int, lr: float) -> Trial:
        return Trial(Setting(LARGE, batches, Method()), lr, tuned=False)

    usual = nesterov(1.0)
    four: dict[str, Any] = {"fleet": "1:1:2:4", "state": "local", **usual}
    return [
        trial(1.6e-3),
        trial(2.5e-3, batches_per_step=8),
        trial(2.5e-3, **usual, **SHORT),
        *untuned(
            trial(6.4e-3, first_sync=0.2, **usual, **SHORT),
            trial(6.4e-3, first_sync=0.2, **usual, **LATE),
        ),
        trial(4e-3, anchor=1, lag=2, **four),
        trial(4e-3, batches_per_step=4),
        shorter(1000, 1.6e-3),
        shorter(2000, 1.6e-3),
        shorter(2000, 1e-3),
        *untuned(
            trial(6.4e-3, **usual, **LATE),
            trial(6.4e-3, codec="int4", **usual, **SHORT),
        ),
    ]


def million() -> list[Trial]:
    """The lines of `large` that matter at its learning rates, with four seeds.

    Two of all lines come first, so that a study that is cut short is paired.
    """

    def trial(lr: float, seeds: int, **settings: Any) -> Trial:
        setting = Setting(LARGE, LARGE_BATCHES, Method(**settings))
        return Trial(setting, lr, seeds, tuned=False)

    usual = nesterov(1.0)
    four: dict[str, Any] = {"fleet": "1:1:2:4", "state": "local", **usual}
    return [
        each
        for seeds in (2, 4)
        for each in (
            trial(1e-3, seeds),
            trial(4e-3, seeds, batches_per_step=4),
            trial(2.5e-3, seeds, anchor=1, lag=2, **four),
            trial(2.5e-3, seeds, anchor=5, lag=4, **four),
            trial(6.4e-3, seeds, batches_per_step=8),
            trial(6.4e-3, seeds, codec="int4", **usual, **SHORT),
            trial(6.4e-3, seeds, codec="int4", first_sync=0.2, **usual, **SHORT),
        )
    ]


def lengthened() -> list[Trial]:
    """A million parameters in runs of 8000 batches, at two learning rates."""
    usual = nesterov(1.0)
    methods: list[dict[str, Any]] = [
        {"batches_per_step": 8},
        {"codec": "int4", **usual, **SHORT},
        {"codec": "int4", "first_sync": 0.2, **usual, **SHORT},
    ]
    single = Setting(LARGE, TEXT_BATCHES, Method())
    return [
        Trial(single, 1e-3, 1, tuned=False),
        *(
            Trial(Setting(LARGE, TEXT_BATCHES, Method(**method)), lr, seeds, False)
            for seeds in (1, 2)
            for lr in (4e-3, 6.4e-3)
            for method in methods
        ),
    ]


def small() -> list[Trial]:
    """The same with 64 k parameters and as few samples."""
    fixed: dict[str, Any] = {"batches": LARGE_BATCHES, "seeds": 4}
    four: dict[str, Any] = {"fleet": "1:1:2:4", "state": "local", **nesterov(1.0)}
    usual = nesterov(1.0)
    return [
        text(5e-3, **fixed),
        text(8e-3, batches_per_step=4, **fixed),
        text(1e-2, batches_per_step=8, **fixed),
        text(1e-2, **usual, **SHORT, **fixed),
        text(1e-2, codec="int4", **usual, **SHORT, **fixed),
        text(1e-2, **usual, **LATE, **fixed),
        text(1e-2, first_sync=0.2, **usual, **SHORT, **fixed),
        text(1e-2, first_sync=0.2, **usual, **LATE, **fixed),
        text(8e-3, anchor=1, **four, **fixed),
        text(8e-3, anchor=1, lag=2, **four, **fixed),
    ]


STUDIES: dict[str, Callable[[], list[Trial]]] = {
    "phases": phases,
    "openings": openings,
    "warm_ups": warm_ups,
    "begun": begun,
    "growing": growing,
    "grown": grown,
    "steps": steps,
    "partial": partial,
    "averages": averages,
    "dense": dense,
    "hundred": hundred,
    "small": small,
    "large": large,
    "million": million,
    "lengthened": lengthened,
}
