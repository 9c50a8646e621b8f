"""A planned schedule as a picture, for people who installed ``elche[plot]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from elche.errors import ConfigError
from elche.schedule.actions import Kind
from elche.schedule.drawing import KIND_NAMES
from elche.schedule.planning.plan import Candidate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png")
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLORS = {
    Kind.FORWARD: "#56B4E9",
    Kind.FULL_BACKWARD: "#D55E00",
    Kind.BACKWARD_INPUT: "#E69F00",
    Kind.BACKWARD_WEIGHT: "#009E73",
}
_PALE = 0.6  # opacity of a rank's second stage and of later ones
_NUMBERED_SHARE = 0.012  # of the makespan: narrower actions carry no number
_WIDTH_IN, _ROW_IN, _FRAME_IN = 13.0, 0.42, 1.6


def plot_schedule(candidate: Candidate, names: list[str], path: Path) -> None:
    """Writes each rank's computation on one time axis, as SVG or PNG.

    Actions carry the number of their microbatch; those of a rank's second stage and of
    later ones are paler.

    Args:
        candidate: to draw.
        names: of the ranks' devices.
        path: ends in .svg or .png.

    Raises:
        ConfigError: another ending, matplotlib is not installed, or the file cannot be
            written.
    """
    check_suffix(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "drawing a schedule needs matplotlib; install it with pip install "
            "'elche[plot]'"
        ) from error
    height_in = _FRAME_IN + _ROW_IN * len(names)
    figure = Figure(
        figsize=(_WIDTH_IN, height_in), dpi=130, layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    present = [_draw_rank(axes, candidate, rank) for rank in range(len(names))]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, candidate.timing.makespan)
    axes.set_xlabel("time in seconds")
    axes.set_title(
        f"{candidate.schedule.name}: {candidate.schedule.num_microbatches} "
        f"microbatches, step {candidate.step_s:.4g} s (predicted)",
        fontsize=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    shown = set().union(*present)
    handles = [
        Patch(color=color, label=KIND_NAMES[kind])
        for kind, color in _COLORS.items()
        if kind in shown
    ]
    if candidate.schedule.num_stages > len(names):
        later = Patch(color=_COLORS[Kind.FORWARD], alpha=_PALE)
        later.set_label("paler: a device's later stages")
        handles.append(later)
    figure.legend(
        handles=handles,
        loc="outside lower right",
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
    try:
        figure.savefig(path, format=path.suffix[1:].lower())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def check_suffix(path: Path) -> None:
    """Makes sure that a picture can be written under this name.

    Raises:
        ConfigError: it does not end in .svg or .png.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"expected a picture whose name ends in .svg or .png, got {path.name}"
        )


def _draw_rank(axes: Axes, candidate: Candidate, rank: int) -> set[Kind]:
    """Draws one rank's bars; returns the kinds of action among them."""
    timing, costs = candidate.timing, candidate.costs
    first = min(candidate.schedule.stages_of(rank))
    kinds = set()
    for one, start in zip(
        candidate.schedule.actions[rank], timing.action_starts[rank], strict=True
    ):
        cost = costs.stages[one.stage]
        length = {
            Kind.FORWARD: cost.forward,
            Kind.FULL_BACKWARD: cost.full_backward,
            Kind.BACKWARD_INPUT: cost.input_gradient,
            Kind.BACKWARD_WEIGHT: cost.weight_gradient,
        }[one.kind]
        kinds.add(one.kind)
        axes.broken_barh(
            [(start, length)],
            (rank - 0.4, 0.8),
            facecolors=_COLORS[one.kind],
            edgecolors="white",
            linewidth=0.3,
            alpha=1.0 if one.stage == first else _PALE,
            gid=str(one),  # the action's name, to find it in an SVG
        )
        if length >= _NUMBERED_SHARE * timing.makespan:
            axes.text(
                start + length / 2,
                rank,
                str(one.microbatch),
                ha="center",
                va="center",
                fontsize=6,
            )
    return kinds
