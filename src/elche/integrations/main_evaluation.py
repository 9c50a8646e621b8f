"""Evaluation on rank 0 for all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, final

import torch

from elche.comm.transport.process_group import Group

TICK_S = 20.0
"""While rank 0 evaluates, the others hear of it so often."""
_END = "the end of rank 0's evaluation"


@final
class MainEvaluation:
    """Evaluation on rank 0, with the result on every rank; the others wait for it.

    Args:
        group: of the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ticked_s: float | None = None

    def run(self, evaluate: Callable[[], Any]) -> Any:
        """Evaluates on rank 0; returns there and elsewhere what JSON makes of it."""
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        raw = b""
        if self._group.rank == 0:
            self._ticked_s = time.monotonic()
            try:
                raw = json.dumps(evaluate(), default=float).encode()
            finally:
                self._ticked_s = None
            length += len(raw)
            self._group.broadcast(length, _END)
        while not length:
            self._group.broadcast(length, _END)
        text = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if raw:
            text.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        self._group.broadcast(text, "the metrics of rank 0's evaluation")
        return json.loads(text.numpy().tobytes())

    def tick(self) -> None:
        """Rank 0 has evaluated another batch; elsewhere, and outside of it, nothing."""
        now_s = time.monotonic()
        every_s = min(TICK_S, self._group.timeout_s / 4)
        if self._ticked_s is not None and now_s - self._ticked_s > every_s:
            self._ticked_s = now_s
            self._group.broadcast(torch.zeros(1, dtype=torch.int64, device="cpu"), _END)
