"""The demo's figures as sentences."""

from __future__ import annotations

from collections.abc import Sequence

from elche.demo.compare import (
    MOST_OVERRUN,
    ContenderRun,
    Devices,
    devices_in_words,
)
from elche.monitor.results import ContenderResult

EQUAL_WITHIN = 0.02
"""A single run does not tell differences below this apart."""


def sentences(table: Sequence[ContenderResult], target_loss: float | None) -> list[str]:
    """Two or three sentences on what a user gains, computed from the figures."""
    ours = [row for row in table if row.name.startswith("elche")]
    alone = [row for row in table if row.name.startswith("solo")]
    ddp = next(row for row in table if row.name == "ddp")
    fastest = max(alone, key=lambda row: row.samples_per_s)
    default = next(row for row in ours if row.name == "elche-sync")
    said = [
        f"{default.name}, the default, trains {default.samples_per_s:.0f} samples per"
        f" second on both devices, {_share(default)} of what the two deliver alone,"
        " with the result of one device; PyTorch's"
        f" DistributedDataParallel trains {ddp.samples_per_s:.0f} ({_share(ddp)}), the"
        f" fastest device alone {fastest.samples_per_s:.0f}."
    ]
    reached = [row for row in ours if row.time_to_loss_s]
    if target_loss is None or not reached:
        return [*said, "elche did not reach the loss that the others reached."]
    best = min(reached, key=lambda row: row.time_to_loss_s or 0.0)
    said.append(
        f"{best.name} reaches the evaluation loss {target_loss:.3f} after"
        f" {best.time_to_loss_s:.1f} s: {_compared(best, fastest)} the fastest device"
        f" alone, {_compared(best, ddp)} DistributedDataParallel."
    )
    worse = [row for row in ours if (row.gain or 0.0) < 1 - EQUAL_WITHIN]
    if worse:
        names = devices_in_words([row.name for row in worse])
        said.append(f"Here {names} did not pay: slower to that loss than one device.")
    return said


def what_was_emulated(devices: Devices, runs: Sequence[ContenderRun]) -> str:
    """The demo's last word: what was real, what was not, and how well it held."""
    together = "The runs alone trained at the same time, each on its own device."
    if not devices.emulated:
        names = devices_in_words(runs[0].devices)
        return f"Nothing was emulated: {names}. {together}"
    times = [f"{devices.ms_per_sample / speed:g} ms" for speed in devices.speeds]
    worst = max(runs, key=lambda run: run.overrun_share)
    text = (
        "Emulated: both devices are processes on this machine's CPU, whose real"
        f" training is stretched by sleeping to {devices_in_words(times)} per sample."
        " Text, model, gradients, losses and communication are real."
        f" {together} Real computing exceeded the emulated time by"
        f" {worst.overrun_share:.1%} at most (in {worst.name})."
    )
    if worst.overrun_share > MOST_OVERRUN:
        text += (
            " That is too much: the machine was busy or is too slow for this, and the"
            " figures say little about such devices. Run it again on a quiet machine."
        )
    return text


def _share(row: ContenderResult) -> str:
    return f"{row.efficiency or 0.0:.0%}"


def _compared(ours: ContenderResult, theirs: ContenderResult) -> str:
    """``1.21 times as fast as``, by the time to the loss."""
    if not ours.time_to_loss_s or not theirs.time_to_loss_s:
        return "not comparable with"
    factor = theirs.time_to_loss_s / ours.time_to_loss_s
    if abs(factor - 1) <= EQUAL_WITHIN:
        return "just as fast as"
    return f"{'' if factor > 1 else 'only '}{factor:.2f} times as fast as"
