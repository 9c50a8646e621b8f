"""The demo's picture: loss over time, and throughput beside the sum of the devices."""

from __future__ import annotations

from pathlib import Path

from elche.demo.outcome import SOLO, DemoOutcome

_STYLES = list(zip(("0.35", "0.65", "C3", "C0", "C2", "C1"), "osvD^x", strict=True))


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
