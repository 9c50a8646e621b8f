"""The studies: which methods are compared, and where to seek their learning rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.convergence.method import Method
from benchmarks.convergence.results import Setting
from benchmarks.convergence.search import Trial

TEXT_BATCHES = 8000
LONG = 16_000
DIGITS_BATCHES = 1000
LENGTHS = (1000, 2000, 3000, 4000, 5000, 6000)
FINAL_SEEDS = 8


def alone(setting: Setting) -> Setting:
    """One device with as many samples of the same task."""
    optimizer = setting.method.optimizer
    return Setting(setting.task, setting.batches, Method(optimizer=optimizer))


def text(
    centre: float, *, seeds: int = 2, batches: int = TEXT_BATCHES, **settings: Any
) -> Trial:
    """A trial of the text task."""
    return Trial(Setting("text", batches, Method(**settings)), centre, seeds)


def untuned(*trials: Trial) -> list[Trial]:
    """The same at one learning rate each."""
    return [replace(trial, tuned=False) for trial in trials]


def nesterov(outer_lr: float, momentum: float = 0.5) -> dict[str, Any]:
    """Settings of the outer step."""
    return {"outer": "nesterov", "outer_lr": outer_lr, "outer_momentum": momentum}


def slowmo(outer_lr: float, momentum: float) -> dict[str, Any]:
    """Settings of the outer step."""
    return {"outer": "slowmo", "outer_lr": outer_lr, "outer_momentum": momentum}


def base() -> list[Trial]:
    """One device, and DDP (as many batches in a step as there are ranks)."""
    return [
        text(2.5e-3, seeds=FINAL_SEEDS),
        text(6e-3, seeds=FINAL_SEEDS, batches_per_step=4),
        text(8e-3, seeds=FINAL_SEEDS, batches_per_step=8),
    ]


def curve() -> list[Trial]:
    """One device with fewer samples: what a loss is worth."""
    return [text(4e-3, seeds=4, batches=length) for length in LENGTHS]


def outers() -> list[Trial]:
    """The outer step at eight ranks, blocking, state averaged, windows of 110."""
    steps = [
        {},
        nesterov(1.0),
        nesterov(1.4),
        nesterov(2.0),
        nesterov(0.7, 0.7),
        nesterov(1.4, 0.7),
        nesterov(0.5, 0.8),
        slowmo(1.0, 0.6),
    ]
    return [text(5e-3, seeds=4, fleet="8 mixed", anchor=5, **step) for step in steps]


def lags() -> list[Trial]:
    """Lag apart from optimizer state, at eight ranks and windows of 110 batches."""
    fixed: dict[str, Any] = {"fleet": "8 mixed", "anchor": 5}
    usual, long = nesterov(1.0), nesterov(0.7, 0.7)
    return untuned(
        text(8e-3, state="average", **usual, **fixed),
        text(8e-3, state="local", **usual, **fixed),
        text(8e-3, state="local", lag=4, **usual, **fixed),
        text(8e-3, state="late", lag=4, **usual, **fixed),
        text(8e-3, state="local", lag=-1, **usual, **fixed),
        text(8e-3, state="local", lag=4, **long, **fixed),
        text(8e-3, state="local", lag=4, anticipate=True, **long, **fixed),
        text(8e-3, state="local", lag=-1, **long, **fixed),
        text(8e-3, state="local", lag=-1, anticipate=True, **long, **fixed),
    )


def shape() -> list[Trial]:
    """Blocking with averaged state: shorter and sparse synchronisation."""
    fixed = {"fleet": "8 mixed", **nesterov(1.0)}
    return untuned(
        text(8e-3, anchor=1, **fixed),
        text(8e-3, anchor=5, first_anchor=1, **fixed),
        text(8e-3, anchor=5, weights="samples", **fixed),
        text(8e-3, anchor=1, top=0.2, **fixed),
    )


def sparse() -> list[Trial]:
    """The same with local state, and overlapped."""
    fixed: dict[str, Any] = {"fleet": "8 mixed", "state": "local", **nesterov(1.0)}
    return untuned(
        text(8e-3, anchor=1, **fixed),
        text(8e-3, anchor=2, **fixed),
        text(8e-3, anchor=1, lag=2, **fixed),
        text(8e-3, anchor=1, lag=-1, **fixed),
        text(8e-3, seeds=4, anchor=5, **fixed),
        text(8e-3, anchor=5, first_anchor=1, **fixed),
        text(8e-3, anchor=5, first_anchor=1, lag=4, **fixed),
        text(8e-3, anchor=1, top=0.2, **fixed),
        text(8e-3, anchor=1, top=0.05, **fixed),
        text(8e-3, anchor=1, top=0.2, lag=2, **fixed),
    )


def codecs() -> list[Trial]:
    """What quantised drifts cost, at eight ranks with local state."""
    fixed = {"fleet": "8 mixed", "state": "local", **nesterov(1.0)}
    return untuned(
        text(8e-3, anchor=5, codec="int8", **fixed),
        text(8e-3, anchor=5, codec="int4", **fixed),
        text(8e-3, anchor=1, codec="int8", **fixed),
        text(8e-3, anchor=1, codec="int4", **fixed),
        text(8e-3, anchor=1, codec="int4", lag=2, **fixed),
    )


def four() -> list[Trial]:
    """Four ranks."""
    fixed = {"fleet": "1:1:2:4"}
    short = {"anchor": 1, "state": "local", **fixed}
    return untuned(
        text(6e-3, anchor=5, **nesterov(1.0), **fixed),
        text(6e-3, anchor=5, **nesterov(1.4), **fixed),
        text(6e-3, anchor=5, **nesterov(0.7), **fixed),
        text(6e-3, anchor=5, state="local", **nesterov(1.0), **fixed),
        text(6e-3, anchor=5, state="local", lag=4, **nesterov(1.0), **fixed),
        text(6e-3, anchor=5, state="late", lag=4, **nesterov(1.0), **fixed),
        text(6e-3, anchor=5, state="local", lag=-1, **nesterov(1.0), **fixed),
        text(6e-3, anchor=5, state="local", lag=-1, **nesterov(0.7), **fixed),
        text(6e-3, anchor=2, state="local", **nesterov(1.0), **fixed),
        text(6e-3, **nesterov(1.0), **short),
        text(6e-3, lag=2, **nesterov(1.0), **short),
        text(6e-3, codec="int4", **nesterov(1.0), **short),
    )


def rates() -> list[Trial]:
    """Four ranks, overlapped in the shortest windows: the outer rate."""
    fixed: dict[str, Any] = {"fleet": "1:1:2:4", "anchor": 1, "lag": 2}
    fixed["state"] = "local"
    return [text(6e-3, seeds=4, **nesterov(rate), **fixed) for rate in (0.7, 1.0, 1.4)]


def gradients() -> list[Trial]:
    """Gradient windows (22 and 110 batches a step), and gradients that come late."""
    return [
        text(8e-3, batches_per_step=22),
        text(8e-3, batches_per_step=110),
        text(8e-3, batches_per_step=8, delay=1),
        text(5e-3, batches_per_step=8, delay=2),
        text(5e-3, batches_per_step=8, delay=4),
    ]


def anchors() -> list[Trial]:
    """Long windows, blocking."""
    local: dict[str, Any] = {"state": "local"}
    return untuned(
        text(8e-3, fleet="8 mixed", anchor=20, **local, **nesterov(1.0)),
        text(8e-3, fleet="8 mixed", anchor=20, **nesterov(1.0)),
        text(6e-3, fleet="1:1:2:4", anchor=20, **local, **nesterov(1.0)),
        text(6e-3, fleet="1:1:2:4", anchor=20, **nesterov(1.0)),
        text(4e-3, fleet="1:4", anchor=100, **local, **nesterov(1.0)),
    )


def sgd() -> list[Trial]:
    """SGD with momentum 0.9 in place of AdamW; the first is one device."""
    fixed: dict[str, Any] = {"optimizer": "sgd", "fleet": "8 mixed", **nesterov(1.0)}
    return [
        text(0.2, seeds=4, optimizer="sgd"),
        text(0.8, seeds=4, optimizer="sgd", batches_per_step=8),
        text(0.4, seeds=4, anchor=1, state="local", **fixed),
        text(0.4, seeds=4, anchor=1, lag=2, state="local", **fixed),
        text(0.4, seeds=4, anchor=5, state="local", **fixed),
        text(0.4, seeds=4, anchor=5, **fixed),
    ]


def eight() -> list[Trial]:
    """Eight ranks, overlapped in the shortest windows: the outer step."""
    fixed: dict[str, Any] = {"fleet": "8 mixed", "anchor": 1, "lag": 2}
    fixed["state"] = "local"
    return [
        text(8e-3, seeds=4, **nesterov(1.0), **fixed),
        *untuned(
            text(8e-3, seeds=4, **nesterov(0.7, 0.7), **fixed),
            text(8e-3, seeds=4, **nesterov(0.7), **fixed),
            text(8e-3, seeds=4, **nesterov(1.4), **fixed),
            text(1.28e-2, seeds=4, **fixed),
        ),
    ]


def two() -> list[Trial]:
    """Two ranks, overlapped."""
    fixed: dict[str, Any] = {"fleet": "1:4", "state": "local", "seeds": 4}
    return untuned(
        text(4e-3, anchor=1, lag=2, **nesterov(0.7), **fixed),
        text(4e-3, anchor=5, lag=4, **nesterov(0.7), **fixed),
        text(4e-3, anchor=5, lag=4, **nesterov(1.0), **fixed),
        text(4e-3, anchor=5, lag=-1, **nesterov(0.7), **fixed),
        text(4e-3, anchor=5, lag=4, weights="samples", **fixed),
        text(4e-3, anchor=20, lag=4, **nesterov(0.7), **fixed),
    )


def rules() -> list[Trial]:
    """How drifts weigh, and what becomes of the optimizer's state; blocking."""
    two: dict[str, Any] = {"fleet": "1:4", "anchor": 5, **nesterov(0.7)}
    eight: dict[str, Any] = {"fleet": "8 mixed", "anchor": 5, **nesterov(1.0)}
    return untuned(
        text(4e-3, **two),
        text(4e-3, state="reset", **two),
        text(4e-3, weights="sqrt", **two),
        text(4e-3, weights="samples", **two),
        text(8e-3, state="reset", **eight),
        text(8e-3, weights="sqrt", **eight),
        text(4e-3, state="local", **two),
        text(4e-3),
    )


def long() -> list[Trial]:
    """Eight ranks with twice as many samples; the first three are one device."""
    fixed: dict[str, Any] = {"batches": LONG, "fleet": "8 mixed", "state": "local"}
    return untuned(
        text(4e-3, batches=LONG, seeds=4),
        text(4e-3, batches=LONG * 3 // 4, seeds=4),
        text(8e-3, batches=LONG, seeds=4, batches_per_step=8),
        text(8e-3, anchor=1, lag=2, seeds=4, **nesterov(1.0), **fixed),
        text(8e-3, anchor=5, **nesterov(1.0), **fixed),
        text(8e-3, anchor=5, lag=4, seeds=4, **nesterov(1.0), **fixed),
    )


def final() -> list[Trial]:
    """More seeds of what matters most."""
    eight: dict[str, Any] = {"fleet": "8 mixed", **nesterov(1.0)}
    four: dict[str, Any] = {"fleet": "1:1:2:4", **nesterov(1.0)}
    more = {"seeds": FINAL_SEEDS, "state": "local"}
    return untuned(
        text(8e-3, anchor=1, lag=2, codec="int4", **more, **eight),
        text(8e-3, anchor=5, seeds=FINAL_SEEDS, **eight),
        text(8e-3, anchor=5, lag=4, **more, **eight),
        text(8e-3, anchor=1, **more, **eight),
        text(6e-3, anchor=1, lag=2, **more, **four),
        text(6e-3, anchor=5, lag=4, **more, **four),
    )


def digits() -> list[Trial]:
    """Error rate of a network with batch norm, ten seeds, one learning rate."""

    def trial(**settings: Any) -> Trial:
        return Trial(Setting("digits", DIGITS_BATCHES, Method(**settings)), 3e-3, 10)

    late: dict[str, Any] = {"state": "local", **nesterov(1.0)}
    return untuned(
        trial(),
        trial(batches_per_step=8),
        trial(fleet="8 mixed", anchor=1, state="local", **nesterov(1.0)),
        trial(fleet="8 mixed", anchor=1, lag=2, codec="int4", **late),
        trial(fleet="8 mixed", anchor=5, lag=4, **late),
        trial(fleet="8 mixed", anchor=5, **nesterov(1.0)),
        trial(fleet="1:1:2:4", anchor=5, lag=4, **late),
        trial(fleet="1:4", anchor=5, state="local", lag=4, **nesterov(0.7)),
    )


STUDIES: dict[str, Callable[[], list[Trial]]] = {
    "base": base,
    "curve": curve,
    "outers": outers,
    "lags": lags,
    "shape": shape,
    "sparse": sparse,
    "codecs": codecs,
    "gradients": gradients,
    "anchors": anchors,
    "sgd": sgd,
    "eight": eight,
    "four": four,
    "rates": rates,
    "two": two,
    "rules": rules,
    "long": long,
    "final": final,
    "digits": digits,
}
