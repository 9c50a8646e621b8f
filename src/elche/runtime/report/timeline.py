"""Timeline of a rank's activities, written at every batch and read once at most."""

from __future__ import annotations

from collections import deque
from typing import final

from elche.monitor.trace import BATCH, DATA_WAIT, Span

MOST_RECORDS = 200_000

_Batch = tuple[str, int, float, float, float, int]


@final
class Timeline:
    """The newest records of one rank.

    A batch is kept as one tuple of plain values, which costs a tenth of the spans that
    are made of it when somebody asks, and nothing in Python's search for circles.

    Args:
        rank: whose.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._records: deque[_Batch | Span] = deque(maxlen=MOST_RECORDS)

    @property
    def spans(self) -> list[Span]:
        """In the order in which they ended."""
        spans: list[Span] = []
        for record in self._records:
            if isinstance(record, Span):
                spans.append(record)
                continue
            word, number, began_s, ready_s, end_s, samples = record
            spans.append(self._span(DATA_WAIT, DATA_WAIT, began_s, ready_s))
            name = f"{word} {number}"
            spans.append(self._span(name, BATCH, ready_s, end_s, samples))
        return spans

    def add(self, name: str, category: str, start_s: float, end_s: float) -> None:
        """Something other than a batch."""
        self._records.append(self._span(name, category, start_s, end_s))

    def batch(
        self,
        word: str,
        number: int,
        times_s: tuple[float, float, float],
        samples: int,
    ) -> None:
        """A batch is done.

        Args:
            word: what it is called: ``step`` or ``batch``.
            number: of the batch in its epoch.
            times_s: when the loop asked for it, when it was there, when it was done.
            samples: of this rank.
        """
        self._records.append((word, number, *times_s, samples))

    def _span(
        self,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        samples: int | None = None,
    ) -> Span:
        return Span(
            rank=self._rank,
            name=name,
            category=category,
            start_s=start_s,
            duration_s=max(0.0, end_s - start_s),
            args={} if samples is None else {"samples": samples},
        )
