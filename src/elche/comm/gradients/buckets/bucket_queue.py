"""Buckets of one model in the order of reduction; their sums become ``p.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import final

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import Bucket, PassOptions, make_buckets
from elche.comm.transport.process_group import Group

WHAT = "the reduction of gradients"


@dataclass(slots=True)
class Reduced:
    """Record of the gradients that are sums of ranks, by ids of parameters.

    Attributes:
        given: what the last pass that was reduced left each parameter with.
        passes: such passes so far.
        strays: parameters that another pass has come to since.
    """

    given: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    passes: int = 0
    strays: set[int] = field(default_factory=set)

    def is_given(self, parameter: nn.Parameter) -> bool:
        """True if ``p.grad`` is what the last pass published."""
        given = self.given.get(id(parameter))
        return given is not None and given() is parameter.grad is not None


@final
class BucketQueue:
    """Buckets, and how many of them have been sent and summed in a pass.

    Attributes:
        buckets: in order of reduction.
        places: bucket of each parameter by its index, and its place in that.
        side: of the exchanges that this pass uses.
        sent: buckets of this pass.
    """

    def __init__(self, reduced: Reduced) -> None:
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[Bucket, int]] = {}
        self.side = 0
        self.sent = self._summed = 0
        self._reduced = reduced
        self._as_views = True
        self._replaced: list[torch.Tensor | None] = []

    def build(
        self,
        parameters: Sequence[nn.Parameter],
        order: Sequence[int],
        group: Group,
        options: PassOptions,
    ) -> None:
        """Makes buckets anew, together with all ranks; a codec's residuals stay."""
        left = self.residuals()
        self._as_views = options.keeps_strides
        self.buckets = make_buckets([parameters[at] for at in order], options.cap_bytes)
        rest = iter(order)
        for bucket in self.buckets:
            bucket.open(group, options)
            indices = enumerate(islice(rest, len(bucket.parameters)))
            self.places |= {index: (bucket, place) for place, index in indices}
        self.sent = self._summed = 0
        self.load_residuals(left)

    def residuals(self) -> dict[int, torch.Tensor]:
        """Residuals of a codec, flat, by their parameters' ids."""
        pairs = [
            pair
            for bucket in self.buckets
            for pair in zip(bucket.parameters, bucket.residuals(), strict=False)
        ]
        return {id(parameter): left for parameter, left in pairs}

    def load_residuals(self, left: Mapping[int, torch.Tensor]) -> None:
        """Continues from the residuals of other buckets."""
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
            bucket.exchange.reclaim(WHAT)

    def has_sent(self, bucket: Bucket) -> bool:
        """True if a bucket has gone in this pass."""
        return any(bucket is sent for sent in self.buckets[: self.sent])

    def advance(self, scale: float) -> None:
        """Sends buckets that are full, and sums what has come, each in their order.

        All ranks have the last pass's sums once one of this pass is there: the
        gradients that those replaced are dropped.
        """
        buckets = self.buckets
        while self.sent < len(buckets) and not buckets[self.sent].pending:
            buckets[self.sent].send(self.side, scale)
            self.sent += 1
        while self._summed < self.sent and buckets[self._summed].exchange.has_sum:
            buckets[self._summed].finish(self.side)
            self._summed += 1
            self._replaced = []

    def send_rest(self, scale: float) -> None:
        """Sends all buckets that have not gone in this pass."""
        for bucket in self.buckets[self.sent :]:
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

    def finish(self, side: int) -> None:
        """Waits for all sums of a pass."""
        for bucket in self.buckets[self._summed :]:
            bucket.finish(side)

    def settle(self) -> None:
        """All sums were taken; unless each is finite no residual changes."""
        keeps = all([bucket.is_finite for bucket in self.buckets])
        for bucket in self.buckets:
            bucket.settle(keeps=keeps)

    def take_over(self, group: Group, source: int, *, lacks: bool) -> None:
        """Broadcasts the last sums; with all ranks of another group."""
        for bucket in self.buckets:
            bucket.take_over(group, source, lacks=lacks)
        for bucket in self.buckets if lacks else ():
            bucket.finish(self.side)

    @torch.no_grad()
    def publish(self, factor: float) -> None:
        """Gives every parameter that any rank used its sum times ``factor``.

        A gradient of this rank that weighed nothing is dropped where no other rank has
        one.
        """
        record = self._reduced
        record.passes += 1
        replaced: list[torch.Tensor | None] = []
        for bucket in self.buckets:
            if factor != 1.0:
                bucket.rescale(factor)
            if self._as_views and not bucket.exchange.keeps_contribution:
                replaced += [parameter.grad for parameter in bucket.parameters]
            used = bucket.used()
            pairs = zip(bucket.parameters, bucket.summed, used, strict=False)
            for parameter, total, is_used in pairs:
                gradient: torch.Tensor | None = total
                if not is_used:
                    gradient = parameter.grad if record.is_given(parameter) else None
                elif not self._as_views:
                    own = parameter.grad
                    own = torch.empty_like(parameter) if own is None else own
                    gradient = own.copy_(total)
                parameter.grad = gradient
                if gradient is None:
                    record.given.pop(id(parameter), None)
                else:
                    record.given[id(parameter)] = weakref.ref(gradient)
        self._replaced = replaced
