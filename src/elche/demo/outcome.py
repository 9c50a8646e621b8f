"""The demo's results: table, sentences, picture, and figures for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from elche.demo.compare import MOST_DISTURBED, ContenderRun, Devices, machine
from elche.monitor.results import ContenderResult, contenders_to_json, time_to_loss

Curve: TypeAlias = Sequence[tuple[float, float, float]]
"""Evaluations of a contender: seconds, samples, loss."""

SOLO = "solo"
EQUAL_WITHIN = 0.02
"""Relative differences below this are within the noise of a single run."""
_SECONDS, _SAMPLES = 0, 1
_STYLES = list(zip(("0.35", "0.65", "C3", "C0", "C2", "C1"), "osvD^x", strict=True))


class DemoOutcome:
    """Comparison of runs by name; in the run `SOLO` each rank trains alone.

    Attributes:
        title: title of the table.
        curves: evaluations by contender; each solo device is a separate contender.
        disturbed: contenders without a verdict, because the machine was busy.
        warning: names the disturbed runs; empty if there are none.
        target_loss: worst finite final loss, which all converging contenders reach.
        table: one row per contender.
        sentences: explanation of the figures.
        headline: the result as the title of a picture.
        emulated: description of the emulation.
    """

    def __init__(self, devices: Devices, runs: Mapping[str, ContenderRun]) -> None:
        self._devices, self._runs = devices, runs
        kind = "emulated devices" if devices.emulated else "devices"
        self.title = f"a small GPT on two unequal {kind}"
        self.curves = curves = _curves(runs)
        finals = [c[-1][2] for c in curves.values() if not _is_cut(c, curves)]
        self.target_loss = max(filter(math.isfinite, finals), default=None)
        self._disturbance = {name: run.disturbance for name, run in runs.items()}
        busy = {n: d for n, d in self._disturbance.items() if d > MOST_DISTURBED}
        # Every verdict is relative to the solo devices.
        self.disturbed = {n for n in curves if n in busy or SOLO in busy}
        self.warning = ""
        if busy:
            which = ", ".join(f"{name} ({share:.0%})" for name, share in busy.items())
            self.warning = f"DISTURBED by a busy machine: {which} of the time"
        self.table = self._table()
        self.sentences = self._sentences()
        self.headline = (self.warning or self.sentences[1]).replace(": ", ":\n")
        self.emulated = self._what_was_emulated()

    def figures(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """All figures for JSON output, with further facts about the run."""
        solo = self._runs[SOLO]
        return {
            "contenders": contenders_to_json(self.table),
            "speeds": list(self._devices.speeds),
            "devices": list(solo.devices),
            "emulated": self._devices.emulated,
            "target_loss": self.target_loss,
            "parameters": solo.ranks[0]["parameters"],
            "disturbance": self._disturbance,
            "sentences": [*self.sentences, self.emulated],
            **facts,
            "machine": machine(),
        }

    def _table(self) -> list[ContenderResult]:
        runs, curves, solo = self._runs, self.curves, self._runs[SOLO]
        rates = [solo.rate(rank) for rank in range(len(solo.ranks))]
        fastest = curves[f"{SOLO}-{rates.index(max(rates))}"]
        rows = []
        for index, (name, curve) in enumerate(curves.items()):
            alone = index < len(rates)
            rate = rates[index] if alone else runs[name].rate()
            note = solo.devices[index] if alone else "both devices"
            if not alone and (choices := runs[name].ranks[0]["choices"]):
                note += f", chose {choices[-1][0]}"
            if is_cut := _is_cut(curve, curves):
                note += ", stopped early"
            if is_lost := name in self.disturbed:
                note = f"DISTURBED, {note}"
            target = None if is_lost else self.target_loss
            reached = [
                (_reached(fastest, target, axis), _reached(curve, target, axis))
                for axis in (_SECONDS, _SAMPLES)
            ]
            gain, sample_efficiency = (
                best / own if best is not None and own else None
                for best, own in reached
            )
            rows.append(
                ContenderResult(
                    name=name,
                    samples_per_s=rate,
                    efficiency=None if is_lost else rate / sum(rates),
                    sample_efficiency=sample_efficiency,
                    eval_loss=None if is_cut else curve[-1][2],
                    time_to_loss_s=reached[_SECONDS][1],
                    gain=gain,
                    note=note,
                )
            )
        return rows

    def _sentences(self) -> list[str]:
        """Two or three sentences on the user's gain, computed from the figures."""
        table, target_loss, disturbed = self.table, self.target_loss, self.disturbed
        rows = {row.name: row for row in table}
        if not disturbed.isdisjoint(("ddp", "elche-sync")):
            return ["No verdict: a run that it needs was disturbed."]
        judged = [row for row in table if row.name not in disturbed]
        ours = [row for row in judged if row.name.startswith("elche")]
        alone = [row for row in table if row.name.startswith(SOLO)]
        fastest = max(alone, key=lambda row: row.samples_per_s)
        default, ddp = rows["elche-sync"], rows["ddp"]
        parts = [
            f"{default.name}, the default, trains {default.samples_per_s:.0f} samples"
            f" per second on both devices, {default.efficiency:.0%} of what the two"
            " deliver alone, with the result of one device; PyTorch's"
            f" DistributedDataParallel trains {ddp.samples_per_s:.0f}"
            f" ({ddp.efficiency:.0%}), the fastest device alone"
            f" {fastest.samples_per_s:.0f}."
        ]
        reached = [row for row in ours if row.time_to_loss_s]
        if target_loss is None or not reached:
            return [*parts, "elche did not reach the loss that the others reached."]
        best = min(reached, key=lambda row: row.time_to_loss_s or 0.0)
        parts.append(
            f"{best.name} reaches the evaluation loss {target_loss:.3f} after"
            f" {best.time_to_loss_s:.1f} s: {_compared(best, fastest)} the fastest"
            f" device alone, {_compared(best, ddp)} DistributedDataParallel."
        )
        if worse := [r.name for r in ours if (r.gain or 0.0) < 1 - EQUAL_WITHIN]:
            slower = "did not pay: slower to that loss than one device."
            parts.append(f"Here {_in_words(worse)} {slower}")
        return parts

    def _what_was_emulated(self) -> str:
        """The demo's closing text: the emulated and real parts, and the accuracy."""
        devices, disturbance = self._devices, self._disturbance
        together = "The runs alone trained at the same time, each on its own device."
        if not devices.emulated:
            names = _in_words(self._runs[SOLO].devices)
            return f"Nothing was emulated: {names}. {together}"
        times = [f"{devices.ms_per_sample / speed:g} ms" for speed in devices.speeds]
        worst = max(disturbance, key=lambda name: disturbance[name])
        return (
            "Emulated: both devices are processes on this machine's CPU, whose real"
            f" training is stretched by sleeping to {_in_words(times)} per sample."
            " Text, model, gradients, losses and communication are real."
            f" {together} The busy machine delayed computing by"
            f" {disturbance[worst]:.1%} of the training time at most (in {worst})."
        )


def draw(outcome: DemoOutcome, path: Path) -> None:
    """Draws all contenders into a PNG; the title is the result, or the disturbance.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=90, layout="constrained")
    figure.suptitle(outcome.headline, color="C3" if outcome.warning else "black")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    rows = outcome.table
    total = sum(row.samples_per_s for row in rows if row.name.startswith(SOLO))
    for index, (row, (color, marker)) in enumerate(zip(rows, _STYLES, strict=True)):
        seconds, _, losses = zip(*outcome.curves[row.name], strict=True)
        lost = row.name in outcome.disturbed
        line = left.plot(seconds, losses, ":" if lost else "-", label=row.name)[0]
        # An overlapped curve shows as the margin of a thinner one.
        line.set(color=color, linewidth=6 - index, marker=marker)
        line.set(markersize=4 + index, fillstyle="none")
        bar = right.barh(row.name, row.samples_per_s, color=color, alpha=1 - 0.7 * lost)
        share = "disturbed" if lost else f"{row.samples_per_s / total:.0%}"
        right.bar_label(bar, [f" {share} "], label_type="center")
    left.set(xlabel="training time (s)", ylabel="evaluation loss")
    if outcome.target_loss is not None:
        left.axhline(outcome.target_loss, color="black", linewidth=0.8, linestyle="--")
    left.legend(frameon=False)
    right.set(xlabel="samples/s (dashed: sum of the devices alone)")
    right.axvline(total, color="black", linewidth=0.8, linestyle="--")
    right.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _curves(runs: Mapping[str, ContenderRun]) -> Mapping[str, Curve]:
    """Evaluations of the contenders; each solo device is a separate contender."""
    solo = runs[SOLO]
    alone = {f"{SOLO}-{r}": solo.curve(r) for r in range(len(solo.ranks))}
    return alone | {name: run.curve() for name, run in runs.items() if name != SOLO}


def _is_cut(curve: Curve, curves: Mapping[str, Curve]) -> bool:
    """True if the curve is of a solo device that stopped early."""
    return curve[-1][_SAMPLES] < 0.9 * max(c[-1][_SAMPLES] for c in curves.values())


def _reached(curve: Curve, target_loss: float | None, axis: int) -> float | None:
    """Seconds or samples until the target loss, interpolated; None if not reached."""
    if target_loss is None:
        return None
    return time_to_loss([(point[axis], point[2]) for point in curve], target_loss)


def _in_words(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else ", ".join(names)


def _compared(ours: ContenderResult, theirs: ContenderResult) -> str:
    """Phrase like ``1.21 times as fast as``, by the time to the loss."""
    if not ours.time_to_loss_s or not theirs.time_to_loss_s:
        return "not comparable with"
    factor = theirs.time_to_loss_s / ours.time_to_loss_s
    if abs(factor - 1) <= EQUAL_WITHIN:
        return "just as fast as"
    return f"{'' if factor > 1 else 'only '}{factor:.2f} times as fast as"
