"""Timeline of a rank's activities, written at every batch and read once at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, final

from elche.monitor.trace import BATCH, DATA_WAIT, Span

MOST_RECORDS = 200_000

_Batch = tuple[str, int, float, float, float, int, float]


@final
class Timeline:
    """The newest records of one rank.

    A batch is kept as one tuple of plain values, which costs a tenth of the spans that
    are made of it when somebody asks, and nothing in Python's search for circles.

    Args:
        rank: whose.

    Attributes:
        record: takes a batch as it is kept, in one call: what it is called (``step`` or
            ``batch``), its number in the epoch, when the loop asked for it, when it was
            there and when it was done, samples of this rank, and seconds that were
            spent on other ranks.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._records: deque[_Batch | Span] = deque(maxlen=MOST_RECORDS)
        self.record: Callable[[_Batch], None] = self._records.append

    @property
    def spans(self) -> list[Span]:
        """In the order in which they ended."""
        return self._spans_of(self._records)

    def newest(self, most: int) -> list[Span]:
        """Spans of the last so many records."""
        skipped = max(0, len(self._records) - most)
        return self._spans_of(islice(self._records, skipped, None))

    def _spans_of(self, records: Iterable[_Batch | Span]) -> list[Span]:
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
        """Something other than a batch."""
        self._records.append(self._span(name, category, start_s, end_s))

    def _span(
        self, name: str, category: str, start_s: float, end_s: float, **about: Any
    ) -> Span:
        duration_s = max(0.0, end_s - start_s)
        return Span(self.rank, name, category, start_s, duration_s, about)
