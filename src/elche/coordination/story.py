"""Log of recent messages and decisions, read on request. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import fields

from elche.coordination.protocol.events import BatchesDone, Event, StepsDone, Tick
from elche.coordination.protocol.instructions import GrantBatches, Instruction

STORY_ENTRIES = 50_000
"""Log length: some minutes of a busy run, in about 20 MB at most."""
COPIED_ENTRIES = 1_000
"""Newest entries kept in the snapshot for a restarted coordinator."""
_LEASED = (BatchesDone, GrantBatches, StepsDone)


class Story:
    """Log of a run's latest messages and decisions.

    Messages are stored as objects and formatted only on request, so that logging costs
    almost nothing.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[int, float, str, Event | Instruction | str]] = deque(
            maxlen=STORY_ENTRIES
        )

    def __getstate__(self) -> dict[str, object]:
        last = [*self._entries][-COPIED_ENTRIES:]
        return {"_entries": deque(last, maxlen=STORY_ENTRIES)}

    def received(self, event: Event, now_s: float) -> None:
        """Logs a received event; a tick is not logged, only its consequences."""
        if isinstance(event, Tick):
            return
        self._entries.append((event.rank, now_s, "<-", event))

    def sent(self, instruction: Instruction, now_s: float) -> None:
        """Logs a sent instruction."""
        self._entries.append((instruction.rank, now_s, "->", instruction))

    def decided(self, why: str, now_s: float, rank: int = -1) -> None:
        """Logs a decision as text."""
        self._entries.append((rank, now_s, "!!", why))

    def of_rank(self, rank: int | None = None) -> list[str]:
        """Returns a rank's messages and the decisions about it; all for None."""
        return [
            _line(entry) for entry in self._entries if rank is None or entry[0] == rank
        ]

    def of_batch(self, batch: int, epoch: int) -> list[str]:
        """Returns messages that leased or trained a batch."""
        return [
            _line(entry)
            for entry in self._entries
            if isinstance(entry[3], _LEASED)
            and entry[3].epoch == epoch
            and entry[3].start <= batch < entry[3].stop
        ]


def _line(entry: tuple[int, float, str, Event | Instruction | str]) -> str:
    _, now_s, arrow, what = entry
    text = what if isinstance(what, str) else _short(what)
    return f"{now_s:.3f} {arrow} {text}"


def _short(message: Event | Instruction) -> str:
    """Formats a message in one line, with long fields cut."""
    parts = []
    for field in fields(message):
        text = repr(getattr(message, field.name))
        parts.append(f"{field.name}={text if len(text) <= 60 else text[:57] + '...'}")
    return f"{type(message).__name__}({', '.join(parts)})"
