"""Looks at a rank's own gradients before they are reduced, and at the parameters.

Where a loss is no number, nearly every gradient is none: one small tensor tells. On the
CPU its sum is read at once; on an accelerator it is kept there, and copied to the host
behind what is computed when a report is due, so that nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch

from elche.coordination.messages import OwnPart
from elche.coordination.step_numbers import OwnNumbers
from elche.runtime.scalars import (
    BUFFER_VALUES,
    ReadBack,
    Readback,
    begin_readback,
    empty_buffer,
)

SMALL_ELEMENTS = 4096
"""A sum over so many costs no more than a sum of one."""
HALVES = (torch.float16, torch.bfloat16)

_Seen = OwnPart | None
"""What a value was read of: a part's gradients, or (None) the parameters."""


@final
class NumberWatch:
    """Whether one rank's gradients and parameters are numbers, under ``sync``.

    Args:
        parameters: the trainable ones.
        numbers: told what was seen, in order.
        read_back: begins the copy of a device buffer to the host; with one given, CPU
            tensors take the same way.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        numbers: OwnNumbers,
        read_back: ReadBack | None = None,
    ) -> None:
        self._numbers = numbers
        self._read_back = read_back or begin_readback
        self._defers_cpu = read_back is not None
        small = [p for p in parameters if p.numel() <= SMALL_ELEMENTS]
        # What is first in the model comes last in a backward pass, so that it shows
        # also what went wrong on the way.
        self._candidates = small or list(parameters)
        self._looked_at: torch.Tensor | None = None
        self._part: OwnPart = ()
        self._filling: list[_Seen] = []
        self._buffer: torch.Tensor | None = None
        self._under_way: list[tuple[list[_Seen], Readback]] = []

    def begin_step(self, part: OwnPart) -> None:
        """A step begins; () where this rank's part of it does not count."""
        self._part = part

    def look(self) -> None:
        """The step's gradients are complete, and not reduced."""
        if not self._part:
            return
        parameter = self._looked_at
        if parameter is None or parameter.grad is None:
            found = (p for p in self._candidates if p.grad is not None)
            parameter = self._looked_at = next(found, None)
            if parameter is None:
                return
        gradient = parameter.grad
        assert gradient is not None
        self._read(gradient, self._part)

    def report(self, *, final: bool) -> None:
        """Looks at the parameters, and takes in what has come from the device.

        Args:
            final: wait for all of it.
        """
        if self._looked_at is not None:
            self._read(self._looked_at.detach(), None)
        self._send()
        while self._under_way and (final or self._under_way[0][1].is_done()):
            seen, readback = self._under_way.pop(0)
            for of, value in zip(seen, readback.values(), strict=False):
                self._tell(of, value)

    @torch.no_grad()
    def _read(self, tensor: torch.Tensor, of: _Seen) -> None:
        while tensor.numel() > SMALL_ELEMENTS and tensor.dim():
            tensor = tensor[0]
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        wide = torch.float32 if tensor.dtype in HALVES else None
        total = tensor.sum(dtype=wide)
        if tensor.device.type == "cpu" and not self._defers_cpu:
            self._tell(of, total.item())
            return
        if self._buffer is None:
            self._buffer = empty_buffer(tensor.device)
        self._buffer[len(self._filling)].copy_(total)
        self._filling.append(of)
        if len(self._filling) == BUFFER_VALUES:
            self._send()

    def _send(self) -> None:
        if self._buffer is not None and self._filling:
            self._under_way.append((self._filling, self._read_back(self._buffer)))
            self._buffer, self._filling = None, []

    def _tell(self, of: _Seen, value: float) -> None:
        if of is None:
            self._numbers.parameters(is_finite=not math.isnan(value))
        else:
            self._numbers.gradients(of, is_finite=math.isfinite(value))
