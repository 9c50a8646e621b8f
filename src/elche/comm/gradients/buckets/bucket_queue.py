"""Buckets of one model in the order of their reduction, which all ranks keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import final

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import Bucket, make_buckets
from elche.comm.gradients.buckets.bucket_contract import PassOptions
from elche.comm.transport.shared_memory import Members


@final
class BucketQueue:
    """Buckets, and how many of them have been sent and summed in a pass.

    Attributes:
        buckets: in order of reduction.
        places: bucket of each parameter by its index, and its place in that.
        side: of the exchanges that this pass uses.
        sent: buckets of this pass.
    """

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[Bucket, int]] = {}
        self._indices: list[list[int]] = []
        self.side = 0
        self.sent = self._summed = 0

    def build(
        self,
        parameters: Sequence[nn.Parameter],
        order: Sequence[int],
        group: Members,
        options: PassOptions,
    ) -> None:
        """Makes buckets anew, together with all ranks; what a codec left out stays.

        Args:
            parameters: the model's, by their index.
            order: in which their gradients appear.
            group: the process group.
            options: how gradients are packed and sent.
        """
        left = self.residuals()
        ordered = [parameters[index] for index in order]
        self.buckets = make_buckets(ordered, options.cap_bytes)
        rest = iter(order)
        self._indices = [[*islice(rest, len(b.parameters))] for b in self.buckets]
        for bucket, indices in zip(self.buckets, self._indices, strict=True):
            bucket.open(group, options)
            self.places |= {at: (bucket, place) for place, at in enumerate(indices)}
        self.sent = self._summed = 0
        self.load_residuals(left)

    def extra_bytes(self, kept: int) -> int:
        """Bytes beyond the kept ones, summed over the buckets."""
        return sum(bucket.extra_bytes(kept) for bucket in self.buckets)

    def residuals(self) -> dict[int, torch.Tensor]:
        """Residuals of a codec, flat, by their parameters' ids."""
        pairs = [
            pair
            for bucket in self.buckets
            for pair in zip(bucket.parameters, bucket.residuals(), strict=False)
        ]
        return {id(parameter): left for parameter, left in pairs}

    def load_residuals(self, left: Mapping[int, torch.Tensor]) -> None:
        """Goes on from those of other buckets."""
        for bucket in self.buckets:
            known = [left[id(p)] for p in bucket.parameters if id(p) in left]
            if known:
                bucket.load_residuals(known)

    def begin(self) -> None:
        """A pass begins: nothing of it has been sent."""
        self.side = 1 - self.side
        self.sent = self._summed = 0

    def expect(self) -> None:
        """All parameters may receive a gradient in this pass."""
        for bucket in self.buckets:
            bucket.pending = set(range(len(bucket.parameters)))

    def reclaim(self) -> None:
        """Waits until all ranks have taken what was summed last."""
        for bucket in self.buckets:
            bucket.reclaim()

    def has_sent(self, bucket: Bucket) -> bool:
        """True if a bucket has gone in this pass."""
        return any(bucket is sent for sent in self.buckets[: self.sent])

    def send(self, scale: float, *, is_end: bool = False) -> None:
        """Sends gradients times ``scale``: of buckets that are full, or of all."""
        while self.sent < len(self.buckets):
            bucket = self.buckets[self.sent]
            if bucket.pending and not is_end:
                break
            bucket.send(self.side, scale)
            self.sent += 1

    def send_again(self, late: Iterable[int], scale: float) -> None:
        """Sends and sums buckets anew that have gone without these gradients."""
        lacking = {id(self.places[index][0]) for index in late}
        again = [bucket for bucket in self.buckets if id(bucket) in lacking]
        for bucket in again:
            bucket.settle(keeps=False)
            bucket.send(self.side, scale)
        for bucket in again:
            bucket.finish(self.side)

    def sum_arrived(self) -> bool:
        """Sums what has come, in the order of sending; whether that was anything."""
        before = self._summed
        while self._summed < self.sent:
            if not self.buckets[self._summed].advance(self.side):
                break
            self._summed += 1
        return self._summed > before

    def finish(self, side: int) -> None:
        """Waits for all sums of a pass."""
        for bucket in self.buckets[self._summed :]:
            bucket.finish(side)

    def settle(self) -> None:
        """The sums were taken; where any is not finite nothing was left out of them."""
        keeps = all(bucket.is_finite for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.settle(keeps=keeps)

    def take_over(self, group: Members, source: int, *, lacks: bool) -> None:
        """Gives the last sums to who lacks them; with all ranks of another group."""
        for bucket in self.buckets:
            bucket.take_over(group, source, lacks=lacks)
        for bucket in self.buckets if lacks else ():
            bucket.finish(self.side)
