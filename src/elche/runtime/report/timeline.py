"""A rank's timeline, written at every batch, and the trace file of a run.

Ranks of a host read one monotonic clock, so their times need no alignment.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, final

from elche.errors import ConfigError
from elche.monitor.trace import (
    BATCH,
    DATA_WAIT,
    Span,
    spans_from_jsonl,
    spans_to_jsonl,
    to_chrome_trace,
)
from elche.runtime.report.files import replace_file

MOST_RECORDS = 200_000

_Batch = tuple[str, int, float, float, float, int, float]


@final
class Timeline:
    """The newest records of one rank.

    A batch is kept as one tuple of plain values. That costs a tenth of its spans, which
    are made on request, and gives the garbage collector no work.

    Args:
        rank: rank of the timeline.

    Attributes:
        record: appends a batch as one tuple: kind (``step`` or ``batch``), number in
            the epoch, times of request, arrival and end (s), samples of this rank, and
            time spent waiting for other ranks (s).
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._records: deque[_Batch | Span] = deque(maxlen=MOST_RECORDS)
        self.record: Callable[[_Batch], None] = self._records.append

    def newest(self, most: int = MOST_RECORDS) -> list[Span]:
        """Spans of the newest ``most`` records, in the order in which they ended."""
        records = islice(self._records, max(0, len(self._records) - most), None)
        spans: list[Span] = []
        for record in records:
            if isinstance(record, Span):
                spans.append(record)
                continue
            word, number, began_s, ready_s, end_s, samples, wait_s = record
            spans.append(self._span(DATA_WAIT, DATA_WAIT, began_s, ready_s))
            about: dict[str, float] = {"samples": samples}
            if wait_s:
                about["waiting for ranks, ms"] = round(1e3 * wait_s, 3)
            name = f"{word} {number}"
            spans.append(self._span(name, BATCH, ready_s, end_s, **about))
        return spans

    def add(self, name: str, category: str, start_s: float, end_s: float) -> None:
        """Adds a span other than a batch."""
        self._records.append(self._span(name, category, start_s, end_s))

    def _span(
        self, name: str, category: str, start_s: float, end_s: float, **about: Any
    ) -> Span:
        duration_s = max(0.0, end_s - start_s)
        return Span(self.rank, name, category, start_s, duration_s, about)


logger = logging.getLogger(__name__)

TRACE = "ELCHE_TRACE"
"""Variable: directory of the ranks' spans, which the launcher joins."""
MOST_WRITTEN = 50_000
"""Most batches that a rank writes, the newest: about a second's work."""


def write_part(timeline: Timeline) -> None:
    """Writes this rank's spans to the launcher's directory, if it has set one."""
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
    folder: Path,
    path: Path,
    rank_names: Mapping[int, str],
    metadata: dict[str, Any],
    marks: Iterable[Span] = (),
) -> None:
    """Joins the ranks' spans into one trace; a failed write is logged.

    Args:
        folder: directory of the ranks' spans.
        path: path of the trace.
        rank_names: names of all ranks.
        metadata: facts about the run.
        marks: events of the run.
    """
    spans = list(marks)
    silent = []
    for rank in rank_names:
        own: list[Span] = []
        with contextlib.suppress(FileNotFoundError):
            text = Path(folder, f"spans-{rank}.jsonl").read_text(encoding="utf-8")
            own = spans_from_jsonl(text)
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
        replace_file(path, json.dumps(to_chrome_trace(timeline.newest())))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
