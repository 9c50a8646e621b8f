"""Loss curves as a picture, for people who installed ``elche[plot]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elche.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLORS = ("#0072B2", "#E69F00", "#999999", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
_INK = "#333333"


@dataclass(frozen=True)
class LossCurve:
    """Evaluation losses of one contender.

    Attributes:
        name: label in the legend.
        time_s: seconds since the start of training, one per evaluation.
        samples: samples trained on, one per evaluation.
        loss: held-out loss, one per evaluation.

    Raises:
        ConfigError: if the three differ in length or are empty.
    """

    name: str
    time_s: Sequence[float]
    samples: Sequence[float]
    loss: Sequence[float]

    def __post_init__(self) -> None:
        lengths = {len(self.time_s), len(self.samples), len(self.loss)}
        if len(lengths) != 1 or 0 in lengths:
            raise ConfigError(
                f"the curve {self.name!r} needs as many times and samples as losses,"
                f" at least one; got {len(self.time_s)}, {len(self.samples)} and"
                f" {len(self.loss)}"
            )


@dataclass(frozen=True)
class PlotText:
    """Words on the picture.

    Attributes:
        title: what is compared.
        subtitle: on which devices, and which of them are emulated.
        target_loss: drawn as a line in the panel over time, if given.
    """

    title: str
    subtitle: str = ""
    target_loss: float | None = None


def plot_loss_curves(curves: Sequence[LossCurve], path: Path, text: PlotText) -> None:
    """Write a PNG: evaluation loss over time on the left, over samples on the right.

    Raises:
        ConfigError: if matplotlib is not installed, or there is no curve.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plotting loss curves needs matplotlib; install it with"
            " pip install 'elche[plot]'"
        ) from error
    if not curves:
        raise ConfigError("there is no loss curve to plot")
    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    by_time, by_samples = figure.subplots(1, 2, sharey=True)
    for index, curve in enumerate(curves):
        _draw(by_time, curve.time_s, curve, index)
        _draw(by_samples, curve.samples, curve, index)
    if text.target_loss is not None:
        by_time.axhline(text.target_loss, color=_INK, linewidth=0.9, linestyle=":")
        by_time.annotate(
            f"loss {text.target_loss:.3f}",
            (1, text.target_loss),
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
    figure.suptitle(
        text.title + (f"\n{text.subtitle}" if text.subtitle else ""),
        fontsize=11,
        color=_INK,
    )
    figure.savefig(path)


def _draw(axes: Axes, x: Sequence[float], curve: LossCurve, index: int) -> None:
    axes.plot(
        x,
        curve.loss,
        label=curve.name,
        color=_COLORS[index % len(_COLORS)],
        linestyle="-" if index < len(_COLORS) else "--",
        linewidth=1.8,
        marker="o",
        markersize=3,
    )


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_xlim(left=0)
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _zoom(axes: Axes, curves: Sequence[LossCurve]) -> None:
    """Show where contenders differ: not the steep start, nor the slowest's end."""
    early = [curve.loss[max(1, len(curve.loss) // 10) :] for curve in curves]
    finite = [[loss for loss in part if math.isfinite(loss)] for part in early]
    low = min((min(part) for part in finite if part), default=0.0)
    span = max((part[0] for part in finite if part), default=0.0) - low
    if span > 0:
        axes.set_ylim(low - 0.06 * span, low + 1.05 * span)
    ends_s = [curve.time_s[-1] for curve in curves]
    if min(ends_s) > 0:
        axes.set_xlim(0, 1.03 * min(max(ends_s), 3 * min(ends_s)))
