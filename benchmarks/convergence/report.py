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
from statistics import mean, stdev
from typing import Any

from benchmarks.convergence.method import Method
from benchmarks.convergence.results import Results, Setting

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t of a 95 % interval, from one degree of freedom."""


PAIRED = 4
"""With fewer common seeds no interval is given."""


def interval(values: Sequence[float]) -> float:
    """Half the width of the mean's 95 % interval; NaN of a single value.

    Raises:
        ValueError: there are more than eleven values.
    """
    if len(values) < 2:
        return math.nan
    if len(values) - 1 > len(T_975):
        raise ValueError(f"expected at most {len(T_975) + 1} values, got {len(values)}")
    return T_975[len(values) - 2] * stdev(values) / math.sqrt(len(values))


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
        penalty: its difference to the mean of one device.
        half: half of the 95 % interval of differences seed by seed; NaN with fewer than
            four seeds.
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

    def as_dict(self) -> dict[str, Any]:
        """As plain values, rounded."""
        found: dict[str, Any] = {"batches": self.batches}
        found |= {"method": self.method.as_dict(), "lr": self.lr, "seeds": self.seeds}
        for name in ("value", "penalty", "half", "efficiency", "low", "high"):
            number = getattr(self, name)
            found[name] = round(number, 4) if math.isfinite(number) else None
        return found


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
    penalty = mean(by_seed.values()) - mean(alone.values())
    differences = [by_seed[seed] - alone[seed] for seed in by_seed if seed in alone]
    half = interval(differences) if len(differences) >= PAIRED else math.nan
    found = [math.nan] * 3
    if curve:
        most = max(curve)
        losses = [curve[most] + penalty + side for side in (0.0, half, -half)]
        found = [
            samples_for(loss, curve) / most if math.isfinite(loss) else math.nan
            for loss in losses
        ]
    value, runs = mean(by_seed.values()), len(by_seed)
    return Line(setting.batches, setting.method, lr, runs, value, penalty, half, *found)


def difference(
    setting: Setting, other: Setting, results: Results
) -> tuple[int, float, float]:
    """What one setting loses to another, seed by seed, each at its best learning rate.

    Args:
        setting: which.
        other: to which; both were run.
        results: all runs.

    Returns:
        How many seeds both have, the mean difference, and half of its 95 % interval
        (NaN with fewer than four seeds).

    Raises:
        ValueError: they have no seed in common.
    """
    found = []
    for each in (setting, other):
        lr = results.best(each, (0,))
        found.append({} if lr is None else results.of(each)[lr])
    first, second = found
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    if not differences:
        raise ValueError(f"no seed of {setting.key()} and {other.key()} is common")
    half = interval(differences) if len(differences) >= PAIRED else math.nan
    return len(differences), mean(differences), half


def differences_table(
    settings: Sequence[Setting], other: Setting, results: Results
) -> str:
    """A Markdown table of what settings lose to another one."""
    rows = [
        f"| method | seeds | minus {describe(other.method)} |",
        "|---|---|---|",
    ]
    for setting in settings:
        seeds, found, half = difference(setting, other, results)
        spread = "" if math.isnan(half) else f" ± {half:.4f}"
        rows.append(f"| {describe(setting.method)} | {seeds} | {found:+.4f}{spread} |")
    return "\n".join(rows)


def describe(method: Method) -> str:
    """A method in words."""
    if len(method.speeds) == 1:
        if method.batches_per_step == 1:
            return ", ".join(["one device", *_warm_up(method)])
        words = [f"{method.batches_per_step} batches a step"]
        words += [f"{method.delay} steps late"] if method.delay else []
        words += [f"largest {100 * method.top:g} %"] if method.top < 1.0 else []
        words += [method.codec] if method.codec != "fp32" else []
        words += _warm_up(method)
        return ", ".join(words)
    words = [method.fleet, f"anchor {method.anchor}"]
    if method.first_anchor:
        words.append(f"at first {method.first_anchor}")
    if method.last_anchor:
        words.append(f"at last {method.last_anchor}")
    if method.growth:
        words.append(f"growing with power {method.growth:g}")
    for where, part in (("first", method.first_sync), ("last", method.last_sync)):
        words += [f"{where} {100 * part:g} % sync"] if part else []
    if method.first_batches:
        batches = "one batch" if method.first_batches == 1 else "{} batches"
        words.append("steps of " + batches.format(method.first_batches))
    late = "a window late" if method.lag < 0 else f"lag {method.lag}"
    words.append(late if method.lag else "blocking")
    of_state = "second moment average" if method.state == "second" else method.state
    words.append(f"state {of_state}")
    if method.outer == "average":
        words.append("average")
    else:
        name = {"nesterov": "Nesterov", "slowmo": "SlowMo"}[method.outer]
        words.append(f"{name} ({method.outer_lr:g}, {method.outer_momentum:g})")
    for name, usual in (("weights", "equal"), ("codec", "fp32")):
        value = getattr(method, name)
        if value != usual:
            words.append(f"{name} {value}" if name != "codec" else str(value))
    if method.top < 1.0:
        words.append(f"largest {100 * method.top:g} %")
    if method.mix < 1.0:
        words.append(f"{100 * method.mix:g} % of the way")
    if method.anticipate:
        words.append("momentum ahead")
    words += _warm_up(method)
    if method.fade:
        words.append(f"momentum fades over {100 * method.fade:g} %")
    if method.rewarm:
        words.append(f"rate rises over {method.rewarm} ticks")
    if method.optimizer != "adamw":
        words.append(method.optimizer.upper())
    return ", ".join(words)


def _warm_up(method: Method) -> list[str]:
    usual = Method().warm_up
    return [f"warm-up {100 * method.warm_up:g} %"] * (method.warm_up != usual)


def table(lines: Sequence[Line]) -> str:
    """A Markdown table."""
    rows = [
        "| method | lr | seeds | value | minus one device | sample efficiency |",
        "|---|---|---|---|---|---|",
    ]
    lengths = {found.batches for found in lines}
    for found in lines:
        name = describe(found.method)
        if len(lengths) > 1:
            name += f", {found.batches} batches"
        spread = "" if math.isnan(found.half) else f" ± {found.half:.4f}"
        part = "" if math.isnan(found.efficiency) else f"{found.efficiency:.2f}"
        if part and not math.isnan(found.low):
            part += f" ({found.low:.2f} to {found.high:.2f})"
        rows.append(
            f"| {name} | {found.lr:g} | {found.seeds} | "
            f"{found.value:.4f} | {found.penalty:+.4f}{spread} | {part} |"
        )
    return "\n".join(rows)
