"""Pipelines whose messages go through memory, told by what was opened and sent."""

from __future__ import annotations

import pytest

from elche.pipeline.peers.memory_lines import Letter, MemoryLines, OutgoingMemory
from tests.pipeline.cases.pipeline_cases import Trained, Work, piped


def piped_by(work: Work) -> tuple[Trained, int, bool]:
    """As `piped`; to how many ranks this one has such a way, and whether it sent."""
    ways: list[int] = []
    sent: list[int] = []
    really_open, really_send = MemoryLines.open, OutgoingMemory.send

    def open_lines(*given: object) -> MemoryLines:
        opened = really_open(*given)  # type: ignore[arg-type]
        ways.append(len(opened.outgoing))
        return opened

    def send(line: OutgoingMemory, tag: int, letter: Letter) -> None:
        sent.append(tag)
        really_send(line, tag, letter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryLines, "open", staticmethod(open_lines))
        patch.setattr(OutgoingMemory, "send", send)
        trained = piped(work)
    return trained, ways[0], bool(sent)
