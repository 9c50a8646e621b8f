"""What the runs say: means, intervals and sample efficiency.

*Sample efficiency* of a method is the number of samples that one device needs to the
method's loss, over the samples of the method's run. What one device reaches with fewer
samples comes from runs of those lengths, each with its own schedule; between them the
loss is linear in the logarithm of the length. Seeds name initial parameters and the
order of samples, the same for every method; from four common seeds on, intervals are
those of the differences seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.convergence.method import Method
from benchmarks.convergence.results import Results, Setting
from benchmarks.paired import mean_interval

PAIRED = 3
"""With fewer common seeds no interval is given."""


def samples_for(loss: float, curve: Mapping[int, float]) -> float:
    """Batches that one device needs to a loss.

    Args:
        loss: which.
        curve: mean loss by the length of the run; falls with it. Beyond its ends its
            first and last slopes go on.

    Raises:
        ValueError: there are fewer than two lengths.
    """
    lengths = sorted(curve)
    if len(lengths) < 2:
        raise ValueError("expected runs of at least two lengths")
    place = next(
        (i for i in range(1, len(lengths)) if loss >= curve[lengths[i]]),
        len(lengths) - 1,
    )
    short, long = lengths[place - 1], lengths[place]
    along = (curve[short] - loss) / (curve[short] - curve[long])
    return math.exp(math.log(short) + along * math.log(long / short))


@dataclass(frozen=True, slots=True)
class Line:
    """A method's line in a table.

    Attributes:
        batches: of all ranks together.
        method: the method.
        lr: its best learning rate.
        seeds: how many runs of that.
        value: their mean.
        penalty: mean difference to one device, seed by seed.
        half: half of its 95 % interval; NaN with fewer than three seeds.
        efficiency: sample efficiency at the mean penalty.
        low: that at the interval's upper end.
        high: that at its lower end.
    """

    batches: int
    method: Method
    lr: float
    seeds: int
    value: float
    penalty: float
    half: float
    efficiency: float
    low: float
    high: float


def line(
    setting: Setting,
    results: Results,
    alone: Mapping[int, float],
    curve: Mapping[int, float],
) -> Line | None:
    """A method's line; None if it was not run.

    Args:
        setting: which.
        results: all runs.
        alone: what one device reached with as many samples, by seed.
        curve: see :func:`samples_for`; empty leaves efficiency out.
    """
    lr = results.best(setting, (0,))
    if lr is None:
        return None
    by_seed = results.of(setting)[lr]
    differences = [by_seed[seed] - alone[seed] for seed in by_seed if seed in alone]
    penalty = mean(differences)
    half = math.nan
    if len(differences) >= PAIRED:
        half = mean_interval(differences).high - penalty
    found = [math.nan] * 3
    if setting.batches in curve:
        losses = [
            curve[setting.batches] + penalty + side for side in (0.0, half, -half)
        ]
        found = [
            samples_for(loss, curve) / setting.batches
            if math.isfinite(loss)
            else math.nan
            for loss in losses
        ]
    value, runs = mean(by_seed.values()), len(by_seed)
    return Line(setting.batches, setting.method, lr, runs, value, penalty, half, *found)


def describe(method: Method) -> str:
    """A method in words."""
    if len(method.speeds) == 1:
        words = ["one device"]
        words += [f"batch / {method.cut}"] if method.cut > 1 else []
    else:
        words = [f"{method.fleet} ranks", f"anchor {method.anchor}"]
        late = "a window late" if method.lag < 0 else f"lag {method.lag}"
        words.append(late if method.lag else "blocking")
        if method.outer == "average":
            words.append("plain averaging")
        else:
            words.append(f"Nesterov ({method.outer_lr:g}, {method.outer_momentum:g})")
        words += [method.codec] if method.codec != "fp32" else []
    names = {"adamw": [], "sgd": ["SGD"], "muon": ["Muon"]}
    return ", ".join(words + names[method.optimizer])


def table(lines: Sequence[Line]) -> str:
    """A Markdown table."""
    rows = [
        "| batches | method | lr | seeds | value | minus one device "
        "| sample efficiency |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in lines:
        spread = "" if math.isnan(found.half) else f" ± {found.half:.4f}"
        part = "" if math.isnan(found.efficiency) else f"{found.efficiency:.2f}"
        if part and not math.isnan(found.low):
            part += f" ({found.low:.2f} to {found.high:.2f})"
        rows.append(
            f"| {found.batches} | {describe(found.method)} | {found.lr:g} "
            f"| {found.seeds} | {found.value:.4f} | {found.penalty:+.4f}{spread} "
            f"| {part} |"
        )
    return "\n".join(rows)
