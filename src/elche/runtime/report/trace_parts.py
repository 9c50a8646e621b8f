"""A run's timeline in one file, joined from the spans that each rank leaves.

Ranks of a host read one monotonic clock, so their times need no alignment.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elche.errors import ConfigError
from elche.monitor.trace import Span, spans_from_jsonl, spans_to_jsonl, to_chrome_trace
from elche.runtime.report.files import replace_file
from elche.runtime.report.timeline import Timeline

logger = logging.getLogger(__name__)

TRACE = "ELCHE_TRACE"
"""Directory in which each rank leaves its spans, for the launcher to join."""
MOST_WRITTEN = 50_000
"""Newest batches of a rank that are written: a second's work, also for who fails."""


def write_part(timeline: Timeline) -> None:
    """Leaves this rank's spans where the launcher asked for them, if it did."""
    folder = os.environ.get(TRACE)
    if folder is None:
        return
    path = Path(folder, f"spans-{timeline.rank}.jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(spans_to_jsonl(timeline.newest(MOST_WRITTEN)))
    except OSError as error:
        logger.warning("cannot write the timeline to %s: %s", path, error)


def join_parts(
    folder: Path, path: Path, rank_names: Mapping[int, str], metadata: dict[str, Any]
) -> None:
    """Writes one trace of what the ranks left; what cannot be written is logged.

    Args:
        folder: where they left it.
        path: of the trace.
        rank_names: of all ranks.
        metadata: facts about the run.
    """
    spans: list[Span] = []
    silent = []
    for rank in rank_names:
        own: list[Span] = []
        with contextlib.suppress(FileNotFoundError):
            text = Path(folder, f"spans-{rank}.jsonl").read_text(encoding="utf-8")
            # a rank that was killed as it wrote has left a part of a line
            own = spans_from_jsonl(text[: text.rfind("\n") + 1])
        spans += own
        if not own:
            silent.append(rank)
    if silent:
        metadata = {**metadata, "ranks without a timeline": silent}
        logger.warning(
            "the timeline has nothing of ranks %s: they trained no batch through "
            "elche.setup or elche.Trainer, or were killed",
            silent,
        )
    try:
        replace_file(path, json.dumps(to_chrome_trace(spans, rank_names, metadata)))
    except OSError as error:
        logger.warning("cannot write the timeline to %s: %s", path, error)


def save_timeline(path: Path, timeline: Timeline) -> None:
    """Writes one rank's timeline.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        replace_file(path, json.dumps(to_chrome_trace(timeline.spans)))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
