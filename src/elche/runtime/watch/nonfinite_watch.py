"""NaN/Inf checks of a rank's unreduced gradients, and of the parameters.

A NaN or Inf loss makes nearly every gradient NaN or Inf, so small tensors suffice. Of
each backward pass, the first and the last gradient are checked. The last, near the
model's input, also shows later errors. The first may be of another part of the model
(actor and critic). Sums stay on their device. When a report is due, their copies to the
host are enqueued behind its work, so nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch

from elche.comm.gradients.buckets.bucket import SMALL_ELEMENTS
from elche.coordination.protocol.messages import OwnPart
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.runtime.report.scalars import BUFFER_VALUES, Readback, empty_buffer

HALVES = (torch.float16, torch.bfloat16)

_Seen = tuple[OwnPart, int] | None
"""Source of a value: a part's gradient of a parameter, or (None) parameters."""


@final
class NonFiniteWatch:
    """NaN/Inf checks of one rank's gradients and parameters, under ``sync``.

    Args:
        parameters: the trainable ones.
        record: receives the results of the checks, in order.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], record: NonFiniteRecord
    ) -> None:
        self._record = record
        self._parameters = list(parameters)
        sizes = enumerate(parameter.numel() for parameter in parameters)
        self._small = {index for index, size in sizes if 0 < size <= SMALL_ELEMENTS}
        self._looked_at: dict[int, None] = {}
        self._part: OwnPart = ()
        self._passes = 0
        self._is_reported = False
        self._filling: list[_Seen] = []
        self._buffer: torch.Tensor | None = None
        self._under_way: list[tuple[list[_Seen], Readback]] = []

    def look(self, part: tuple[int, ...], came: dict[int, int]) -> None:
        """Checks a complete backward pass, before its gradients are reduced.

        Args:
            part: epoch, step, and this rank's samples of its batch (first, one past the
                last); () if it has none.
            came: number of gradients per parameter, in order of the first.
        """
        if part != self._part:
            self._part, self._passes = part, 0
        if not self._part or not came:
            return
        epoch, step, *samples = self._part
        part = epoch, step, self._passes, *samples
        self._passes += 1
        if self._is_reported:
            self._looked_at.clear()
            self._is_reported = False
        order, is_small = list(came), self._small.__contains__
        first = next(filter(is_small, order), order[-1])
        last = next(filter(is_small, reversed(order)), order[0])
        for index in {first, last}:
            gradient = self._parameters[index].grad
            if gradient is not None:
                self._looked_at[index] = None
                self._keep((part, index), gradient)

    def report(self, *, final: bool) -> None:
        """Checks the parameters, and records results received from the device.

        Args:
            final: wait for all results.
        """
        looked_at = [self._parameters[index].detach() for index in self._looked_at]
        if looked_at:
            self._keep(None, *looked_at)
            self._is_reported = True
        self._send()
        while self._under_way and (final or self._under_way[0][1].is_done()):
            seen, readback = self._under_way.pop(0)
            for of, value in zip(seen, readback.values(), strict=False):
                if of is None:
                    self._record.is_finite = not math.isnan(value)
                else:
                    is_finite = math.isfinite(value)
                    self._record.gradients(*of, is_finite=is_finite)

    def _keep(self, of: _Seen, *tensors: torch.Tensor) -> None:
        """Buffers the largest of the tensors' sums, or NaN, to be read later."""
        total = None
        for tensor in tensors:
            while tensor.numel() > SMALL_ELEMENTS and tensor.dim():
                tensor = tensor[0]
            if tensor.is_complex():
                tensor = torch.view_as_real(tensor)
            own = tensor.sum(dtype=torch.float32 if tensor.dtype in HALVES else None)
            total = own if total is None else torch.maximum(total, own.to(total.device))
        assert total is not None
        if self._buffer is None:
            self._buffer = empty_buffer(total.device)
        self._buffer[len(self._filling)].copy_(total)
        self._filling.append(of)
        if len(self._filling) == BUFFER_VALUES:
            self._send()

    def _send(self) -> None:
        if self._buffer is not None and self._filling:
            self._under_way.append((self._filling, Readback(self._buffer)))
            self._buffer, self._filling = None, []
