"""Loss curves as a picture, for people who installed ``elche[plot]``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from elche.errors import ConfigError

Curve: TypeAlias = Sequence[tuple[float, float, float]]
"""Evaluations of a contender: seconds since the start, samples trained on, loss."""


def plot_loss_curves(
    curves: Sequence[tuple[str, Curve]],
    path: Path,
    title: str,
    target_loss: float | None = None,
) -> None:
    """Writes a PNG: evaluation loss over time on the left, over samples on the right.

    Args:
        curves: names for the legend, and at least one evaluation each.
        path: the file.
        title: what is compared, on which devices.
        target_loss: drawn as a line in the panel over time, if given.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plotting loss curves needs matplotlib; install it with"
            " pip install 'elche[plot]'"
        ) from error
    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained")
    by_time, by_samples = figure.subplots(1, 2, sharey=True)
    for name, points in curves:
        times_s, samples, losses = zip(*points, strict=True)
        by_time.plot(times_s, losses, label=name, marker=".")
        by_samples.plot(samples, losses, marker=".")
    if target_loss is not None:
        label = f"loss {target_loss:.3f}"
        by_time.axhline(target_loss, color="black", linestyle=":", label=label)
    by_time.set(xlabel="time in seconds", ylabel="evaluation loss in nats")
    by_samples.set(xlabel="samples trained on")
    by_time.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path)
