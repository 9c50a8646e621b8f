"""Loss curves as a picture, for people who installed ``elche[plot]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from elche.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLORS = ("#0072B2", "#E69F00", "#999999", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
_INK = "#333333"


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
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plotting loss curves needs matplotlib; install it with"
            " pip install 'elche[plot]'"
        ) from error
    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    by_time, by_samples = figure.subplots(1, 2, sharey=True)
    for index, (name, points) in enumerate(curves):
        times_s, samples, losses = zip(*points, strict=True)
        for axes, along in ((by_time, times_s), (by_samples, samples)):
            axes.plot(
                along,
                losses,
                label=name,
                color=_COLORS[index % len(_COLORS)],
                linestyle="-" if index < len(_COLORS) else "--",
                linewidth=1.8,
                marker="o",
                markersize=3,
            )
    if target_loss is not None:
        by_time.axhline(target_loss, color=_INK, linewidth=0.9, linestyle=":")
        by_time.annotate(
            f"loss {target_loss:.3f}",
            (1, target_loss),
            xycoords=("axes fraction", "data"),
            xytext=(-4, -10),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=_INK,
        )
    _label(by_time, "time in seconds", "evaluation loss in nats")
    _label(by_samples, "samples trained on", "")
    _zoom(by_time, curves)
    by_samples.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, color=_INK)
    figure.savefig(path)


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_xlim(left=0)
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _zoom(axes: Axes, curves: Sequence[tuple[str, Curve]]) -> None:
    """Shows where contenders differ: not the steep start, nor the slowest's end."""
    early = [points[max(1, len(points) // 10) :] for _, points in curves]
    finite = [[p[2] for p in part if math.isfinite(p[2])] for part in early]
    low = min((min(part) for part in finite if part), default=0.0)
    span = max((part[0] for part in finite if part), default=0.0) - low
    if span > 0:
        axes.set_ylim(low - 0.06 * span, low + 1.05 * span)
    ends_s = [points[-1][0] for _, points in curves]
    if min(ends_s) > 0:
        axes.set_xlim(0, 1.03 * min(max(ends_s), 3 * min(ends_s)))
