"""Which runs a study still needs: a learning rate per method, then more seeds of it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.convergence.engine import Column
from benchmarks.convergence.results import Results, Setting

STEP = 2.0
MOST_RATES = 7
SCREENING = (0,)


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting, where to look for its learning rate, and how many seeds it gets.

    Attributes:
        setting: what is trained.
        centre: the middle one of the first three learning rates.
        seeds: of the best learning rate; the first one finds that.
        tuned: False tries the one learning rate only.
    """

    setting: Setting
    centre: float
    seeds: int = 2
    tuned: bool = True


def rounded(lr: float) -> float:
    """A learning rate with three digits, so that it can be a key."""
    return float(f"{lr:.3g}")


def wanted(trial: Trial, results: Results) -> list[Column]:
    """What is to run next; empty when the trial is complete.

    Three learning rates a factor of 1.6 apart with one seed; while the best one is at
    the edge, one more beyond it; then the best one with all seeds.
    """
    known = results.of(trial.setting)
    rates = [rounded(trial.centre * STEP**power) for power in (-1, 0, 1)]
    if not trial.tuned:
        rates = [trial.centre]
    while True:
        missing = [
            Column(seed, lr)
            for lr in rates
            for seed in (SCREENING if trial.tuned else range(trial.seeds))
            if seed not in known.get(lr, {})
        ]
        if missing:
            return missing
        best = results.best(trial.setting, SCREENING, rates)
        assert best is not None
        inside = min(rates) < best < max(rates) or not trial.tuned
        if inside or len(rates) == MOST_RATES:
            break
        rates.append(rounded(best / STEP if best == min(rates) else best * STEP))
    return [Column(s, best) for s in range(trial.seeds) if s not in known[best]]
