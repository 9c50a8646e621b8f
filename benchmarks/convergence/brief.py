"""The study of short runs: what windows cost where there are few batches in all.

Learning rates are those that are best for one device (of three, at 500 to 2000
batches); each setting in the table of `docs/convergence.md` is at its better rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.convergence.search import Trial
from benchmarks.convergence.study import nesterov, text, untuned

LENGTHS = (300, 500, 750, 1500)
"""Further lengths of runs of one device."""


def short() -> list[Trial]:
    """Runs of 500 to 2000 batches; the first ones are one device."""
    two: dict[str, Any] = {"fleet": "1:4", "seeds": 4, **nesterov(0.7)}
    four: dict[str, Any] = {"fleet": "1:1:2:4", "seeds": 4, **nesterov(1.0)}
    eight: dict[str, Any] = {"fleet": "8 mixed", "seeds": 4, **nesterov(1.0)}
    soon: dict[str, Any] = {"anchor": 1, "lag": 2, "state": "local"}
    late: dict[str, Any] = {"anchor": 5, "lag": 4, "state": "local"}
    seldom: dict[str, Any] = {"anchor": 20, "lag": 4, "state": "local"}
    trials = [text(6.4e-3, batches=n, seeds=4) for n in (*LENGTHS[:3], 1000, 2000)]
    trials += [text(5e-3, batches=1500, seeds=4), text(4e-3, batches=2000, seeds=4)]
    for batches in (1000, 2000):
        trials += [
            text(8e-3, batches=batches, seeds=4, batches_per_step=8),
            text(6.4e-3, batches=batches, **soon, **two),
            text(8e-3, batches=batches, **soon, **four),
            text(8e-3, batches=batches, **late, **four),
            text(8e-3, batches=batches, **soon, **eight),
            text(8e-3, batches=batches, **late, **eight),
        ]
    trials += [text(4e-3, batches=2000, **each, **two) for each in (late, seldom)]
    trials += [text(6.4e-3, batches=1000, **each, **two) for each in (late, seldom)]
    trials += [text(6.4e-3, batches=500, **each, **two) for each in (soon, late)]
    for batches in (500, 1000):
        trials += [text(6.4e-3, batches=batches, anchor=a, **two) for a in (1, 5, 20)]
    return untuned(*trials)


STUDIES: dict[str, Callable[[], list[Trial]]] = {"short": short}
