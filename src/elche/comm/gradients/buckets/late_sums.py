"""Sums that are published at the end of the next pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket_queue import BucketQueue


@final
class LateSums:
    """Sums of closed passes that are not yet in `p.grad`.

    The first pass's sums are complete at its end, since buckets are rebuilt then. They
    are kept until the sums of the next pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._under_way: tuple[int, float] | None = None
        self._first: list[torch.Tensor | None] | None = None

    @property
    def are_owed(self) -> bool:
        """True if sums are waiting to be published."""
        return self.are_under_way or self._first is not None

    @property
    def are_under_way(self) -> bool:
        """True if the pending sums are being reduced in the buckets."""
        return self._under_way is not None

    def keep_first(self) -> None:
        """Defers the first sums to the next pass."""
        self._first = self._take()

    def follow(self, factor: float, queue: BucketQueue, scale: float) -> float:
        """Publishes the sums of the last pass, and sends the gradients of this one.

        Args:
            factor: factor of this pass's sums.
            queue: queue of buckets that reduces both.
            scale: factor of this rank's gradients.

        Returns:
            Seconds of waiting.
        """
        own = self._take()
        wait_s = self.publish(queue)
        sums = self._take()
        self._put(own)
        queue.send_rest(scale)
        self._under_way = queue.side, factor
        self._put(sums)
        return wait_s

    def publish(self, queue: BucketQueue) -> float:
        """Publishes pending sums in `p.grad`; returns the seconds waited."""
        first, self._first = self._first, None
        if first is not None:
            self._put(first)
        if first is not None or self._under_way is None:
            return 0.0
        side, factor = self._under_way
        self._under_way = None
        started_s = time.perf_counter()
        queue.finish(side)
        wait_s = time.perf_counter() - started_s
        queue.settle()
        queue.publish(factor)
        return wait_s

    def _take(self) -> list[torch.Tensor | None]:
        """Returns every `p.grad` and sets it to None."""
        taken = [parameter.grad for parameter in self._parameters]
        self._put([None] * len(taken))
        return taken

    def _put(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
