"""Buckets of one model in the order of reduction; their sums become ``p.grad``.

The order is that of the gradients of a pass, observed in the first, then expected. A
parameter usually gets one gradient in a pass. It gets several where it is used in
several segments of reentrant activation checkpointing, each of which accumulates for
itself, and none where a branch was not taken. A bucket that goes before the last one
has come lacks it. The last gradient of a layer that is used again and again comes near
the pass's end, so waiting for that costs little.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn, final

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import Bucket, PassOptions
from elche.comm.transport.process_group import Group
from elche.errors import ConfigError

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
        summed: of them, those whose sums are here.
    """

    def __init__(self, reduced: Reduced) -> None:
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[Bucket, int]] = {}
        self.side = 0
        self.sent = self.summed = 0
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
        """Rebuilds the buckets; a collective call. A codec's residuals stay."""
        left = self.residuals()
        self._as_views = options.keeps_strides
        self.buckets = make_buckets([parameters[at] for at in order], options.cap_bytes)
        rest = iter(order)
        for bucket in self.buckets:
            bucket.open(group, options)
            indices = enumerate(islice(rest, len(bucket.parameters)))
            self.places |= {index: (bucket, place) for place, index in indices}
        self.sent = self.summed = 0
        self.expect()
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
        self.sent = self.summed = 0
        self.expect()

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
        while self.summed < self.sent and buckets[self.summed].exchange.has_sum:
            buckets[self.summed].finish(self.side)
            self.summed += 1
            self._replaced = []

    def send_rest(self, scale: float) -> None:
        """Sends all buckets that have not gone in this pass."""
        for bucket in self.buckets[self.sent :]:
            bucket.send(self.side, scale)
            self.sent += 1

    def send_again(self, late: Iterable[int], scale: float) -> None:
        """Repeats the reduction of buckets that were sent without these gradients."""
        lacking = {id(self.places[index][0]) for index in late}
        again = [bucket for bucket in self.buckets if id(bucket) in lacking]
        for bucket in again:
            bucket.settle(keeps=False)
            bucket.send(self.side, scale)
        for bucket in again:
            bucket.finish(self.side)

    def finish(self, side: int) -> None:
        """Waits for all sums of a pass."""
        for bucket in self.buckets[self.summed :]:
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


def make_buckets(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Buckets of parameters in the given order, one dtype and device each.

    Nothing hides the bucket that is reduced last, so the last parameters (up to a
    quarter of the cap, at least one) get one of their own.
    """
    tail, tail_bytes = len(parameters) - 1, parameters[-1].nbytes
    while tail > 0 and tail_bytes + parameters[tail - 1].nbytes <= cap_bytes // 4:
        tail -= 1
        tail_bytes += parameters[tail].nbytes
    return [*_fill(parameters[:tail], cap_bytes), *_fill(parameters[tail:], cap_bytes)]


def _fill(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Consecutive parameters of one kind together, as long as they fit."""
    buckets: list[Bucket] = []
    filled = 0
    for parameter in parameters:
        last = buckets[-1].parameters[-1] if buckets else None
        same = last is not None and (last.dtype, last.device) == (
            parameter.dtype,
            parameter.device,
        )
        if not same or filled + parameter.nbytes > cap_bytes:
            buckets.append(Bucket([]))
            filled = 0
        buckets[-1].parameters.append(parameter)
        filled += parameter.nbytes
    return buckets


@final
class GradientOrder:
    """Gradients of one pass after the other, by the indices of their parameters.

    In the first pass gradients may come after their bucket has gone, which is then sent
    again; in later ones it waits until the end for parameters that got several.

    Attributes:
        came: gradients of each parameter in this pass, in order of the first.
        late: parameters that got one in this pass after their bucket had gone.
        last: the order of their last gradients in the first pass.
        several: parameters that got several in the first pass.
        is_agreed: all ranks follow one order, which is observed no more.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.last: dict[int, None] = {}
        self.came: dict[int, int] = {}
        self.late: set[int] = set()
        self.several: frozenset[int] = frozenset()
        self.is_agreed = False

    def begin(self) -> None:
        """All gradients of a pass will come."""
        self.came, self.late = {}, set()

    def agree(self, group: Group) -> tuple[list[int], list[int] | None]:
        """Compares what was observed in the first pass; with all ranks.

        Returns:
            Gradients that came too late on any rank, and the order on the first rank
            that has observed one; None: no rank has.
        """
        count = len(self._names)
        rows = torch.zeros(group.world_size + 1, count, dtype=torch.int64, device="cpu")
        if self.last:
            unseen = [at for at in range(count) if at not in self.last]
            rows[group.rank] = torch.tensor([*self.last, *unseen], device="cpu") + 1
        for index in self.late:
            rows[-1, index] = 1
        group.all_reduce(rows, "agreeing on the order of gradients")
        *orders, ranks = rows.tolist()
        order = next(filter(any, orders), None)
        return (
            [index for index, number in enumerate(ranks) if number],
            None if order is None else [index - 1 for index in order],
        )

    def learn(self) -> None:
        """The first pass has ended: what got several gradients may in later ones."""
        self.several = frozenset(i for i, times in self.came.items() if times > 1)
        self.late.clear()

    def settle(self) -> None:
        """All ranks follow one order from now on."""
        self.is_agreed = True
        self.last.clear()

    def is_alike(self, group: Group) -> bool:
        """True if all ranks of a group follow an agreed order, or none does."""
        agreed = torch.tensor([int(self.is_agreed)], device="cpu")
        group.all_reduce(agreed, "comparing the order of gradients")
        return int(agreed) in (0, group.world_size)

    def refuse_late(self) -> NoReturn:
        """Refuses a completed pass whose reduction lacks gradients.

        Raises:
            ConfigError: names a parameter that got one too late.
        """
        index = min(self.late)
        raise ConfigError(
            f"{self._names[index]} got {self.came[index]} gradients in this "
            "backward pass and at most one in the first, the others too late for "
            "the reduction; activation checkpointing needs use_reentrant=False "
            "where a layer is used once in some batches and several times in others"
        )


def formats_agree(parameters: Sequence[nn.Parameter], group: Group) -> bool:
    """True if all ranks hold every parameter in the same memory format."""
    strided = [
        (index, parameter.stride())
        for index, parameter in enumerate(parameters)
        if not parameter.is_contiguous()
    ]
    formats = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    if strided:
        formats[group.rank] = zlib.crc32(repr(strided).encode())
    group.all_reduce(formats, "comparing memory formats")
    return len(set(formats.tolist())) == 1
