"""Pipelines whose messages go through memory, told by what was opened and sent."""

from __future__ import annotations

from typing import Any

import pytest

from elche.comm.transport.message_memory import OutgoingMemory
from elche.comm.transport.messages import Packed
from elche.comm.transport.point_to_point import PointToPoint
from tests.pipeline.cases.pipeline_cases import Trained, Work, piped


def piped_by(work: Work) -> tuple[Trained, int, bool]:
    """As `piped`; to how many ranks this one has such a way, and whether it sent."""
    ways: list[int] = []
    sent: list[int] = []
    really_connect, really_send = PointToPoint.connect, OutgoingMemory.send

    def connect(self: PointToPoint, memory: Any, *rest: Any) -> None:
        ways.append(len(memory))
        really_connect(self, memory, *rest)

    def send(line: OutgoingMemory, tag: int, packed: Packed) -> bool:
        sent.append(tag)
        return really_send(line, tag, packed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PointToPoint, "connect", connect)
        patch.setattr(OutgoingMemory, "send", send)
        trained = piped(work)
    return trained, ways[0], bool(sent)
