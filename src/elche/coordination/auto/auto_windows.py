"""``auto``: settings of the windows that it chooses. Pure."""

from __future__ import annotations

from dataclasses import replace

from elche.cadence.chooser import Choice
from elche.config import RunConfig
from elche.config_parts import OuterConfig

ALONE_ANCHOR = 20
"""Batches in a window of a device that trains alone."""
ANOTHER_ANCHOR = 2
"""Overlapped windows that should be longer or shorter by this factor are rebuilt."""


def windows_config(
    config: RunConfig, choice: Choice, speed_hints: tuple[float, ...] | None
) -> RunConfig:
    """The run's settings, under the chosen policy.

    Args:
        config: of the run.
        choice: what windows are to do.
        speed_hints: batches per second of each rank, as far as they are known.
    """
    name, most = choice.carried_out_by, max(1, config.windows.max_anchor)
    anchor = min(ALONE_ANCHOR if choice.is_alone else choice.anchor, most)
    windows = replace(config.windows, anchor=anchor)
    if name == "async":  # shorter ones would end before their reduction
        lowest = max(anchor, min(windows.min_anchor, most))
        windows = replace(windows, min_anchor=lowest)
    if choice.is_alone:  # its windows only keep the others up to date
        windows = replace(windows, outer=OuterConfig(optimizer="average"))
    return replace(config, policy=name, windows=windows, speed_hints=speed_hints)


def is_outdated(running: Choice, choice: Choice) -> bool:
    """Whether windows run otherwise than was chosen since."""
    if not choice.is_carried_out_as(running):
        return True
    anchors = sorted((choice.anchor, running.anchor))
    overlapped = choice.carried_out_by == "async"
    return overlapped and anchors[1] >= ANOTHER_ANCHOR * anchors[0]
