"""Buckets of one model in the order of reduction; their sums become ``p.grad``.

The order is that of the gradients in the first pass. A parameter usually gets one
gradient in a pass. It gets several if several segments of reentrant activation
checkpointing use it, since each accumulates separately. It gets none if a branch was
not taken. A bucket sent before a parameter's last gradient lacks that gradient. The
last gradient of a reused layer comes near the pass's end, so waiting for it costs
little.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn, final

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import WHAT, Bucket, PassOptions
from elche.comm.transport.process_group import Group, gather_values
from elche.errors import ConfigError


@dataclass(slots=True)
class Reduced:
    """Record of the gradients that are sums over ranks, by parameter ID.

    Attributes:
        given: gradient of each parameter after the last reduced pass.
        passes: number of reduced passes so far.
        strays: parameters that got a gradient in an unreduced pass since.
    """

    given: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    passes: int = 0
    strays: set[int] = field(default_factory=set)

    def is_given(self, parameter: nn.Parameter) -> bool:
        """True if ``p.grad`` is the gradient that the last pass published."""
        given = self.given.get(id(parameter))
        return given is not None and given() is parameter.grad is not None


@final
class BucketQueue:
    """Buckets, and the progress of sending and summing them in a pass.

    Attributes:
        buckets: buckets in order of reduction.
        places: bucket and place in the bucket of each parameter, by its index.
        side: side of the weights' exchange that this pass uses.
        sent: number of buckets sent in this pass.
        summed: number of buckets summed in this pass.
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
        """Rebuilds the buckets and keeps a codec's residuals; a collective call."""
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
        """Returns a codec's flat residuals by parameter ID."""
        return {
            id(parameter): left
            for bucket in self.buckets
            for parameter, left in zip(
                bucket.parameters, bucket.residuals(), strict=False
            )
        }

    def load_residuals(self, left: Mapping[int, torch.Tensor]) -> None:
        """Loads residuals that come from other buckets."""
        for bucket in self.buckets:
            known = [left[id(p)] for p in bucket.parameters if id(p) in left]
            if known:
                bucket.load_residuals(known)

    def begin(self) -> None:
        """Resets the queue at the begin of a pass."""
        self.side = 1 - self.side
        self.sent = self.summed = 0
        self.expect()

    def expect(self) -> None:
        """Marks all parameters as pending."""
        for bucket in self.buckets:
            bucket.pending = set(range(len(bucket.parameters)))

    def reclaim(self) -> None:
        """Waits until all ranks have read the last sums."""
        for bucket in self.buckets:
            bucket.exchange.reclaim(WHAT)

    def advance(self, scale: float, first: nn.Parameter | None = None) -> None:
        """Sends full buckets and collects arrived sums, both in order.

        Args:
            scale: factor of this rank's gradients.
            first: parameter of the pass's first gradient, which stays. Other large ones
                that the contribution holds are dropped, except in the last bucket and
                in sums with additions. None: all stay.

        The first sum of this pass implies that all ranks have the last pass's sums, so
        own gradients replaced by those sums are released.
        """
        buckets, given = self.buckets, self._reduced.is_given
        while self.sent < len(buckets) and not buckets[self.sent].pending:
            bucket = buckets[self.sent]
            bucket.send(scale)
            self.sent += 1
            if first is not None and scale and self.sent < len(buckets):
                bucket.drop_sent(lambda p: p is first or given(p))
        while self.summed < self.sent:
            exchange = buckets[self.summed].exchange
            if not (exchange.has_sum and exchange.poll()):  # failures are raised later
                break
            buckets[self.summed].finish()
            self.summed += 1
            self._replaced = []

    def send_rest(self, scale: float) -> None:
        """Sends the remaining buckets of this pass."""
        for bucket in self.buckets[self.sent :]:
            bucket.send(scale)
            self.sent += 1

    def send_again(self, late: Iterable[int], scale: float) -> None:
        """Repeats the reduction of buckets that were sent without late gradients."""
        lacking = {id(self.places[index][0]) for index in late}
        again = [bucket for bucket in self.buckets if id(bucket) in lacking]
        for bucket in again:
            bucket.settle(keeps=False)
            bucket.send(scale)
        for bucket in again:
            bucket.finish()

    def finish(self) -> None:
        """Waits for all sums of a pass."""
        for bucket in self.buckets[self.summed + 1 :]:
            bucket.exchange.poll()  # others may be waiting for this rank's parts
        for bucket in self.buckets[self.summed :]:
            bucket.finish()

    def settle(self) -> None:
        """Commits residuals after all sums; none if any sum is not finite."""
        keeps = all([bucket.is_finite for bucket in self.buckets])
        for bucket in self.buckets:
            bucket.settle(keeps=keeps)

    def adopt_sums(self, group: Group, source: int, *, lacks: bool) -> None:
        """Copies the last sums to ranks that lack them; collective in a new group."""
        for bucket in self.buckets:
            bucket.adopt_sums(group, source, lacks=lacks)
        for bucket in self.buckets if lacks else ():
            bucket.finish()

    @torch.no_grad()
    def publish_own(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Records this rank's gradients times ``factor`` as the sums."""
        record, self._replaced = self._reduced, []
        record.passes += 1
        record.given.clear()
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                if factor != 1.0:
                    gradient.mul_(factor)
                record.given[id(parameter)] = weakref.ref(gradient)

    @torch.no_grad()
    def publish(self, factor: float) -> None:
        """Sets ``p.grad`` to sum times ``factor`` where any rank used the parameter.

        A local gradient of weight 0 is dropped if no other rank has one.
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
    """Packs parameters in the given order into buckets of one dtype and device each.

    The last bucket's reduction cannot overlap with backward, so it is small: the last
    parameters, up to a quarter of the capacity, but at least one.
    """
    tail, tail_bytes = len(parameters) - 1, parameters[-1].nbytes
    while tail > 0 and tail_bytes + parameters[tail - 1].nbytes <= cap_bytes // 4:
        tail -= 1
        tail_bytes += parameters[tail].nbytes
    return [*_fill(parameters[:tail], cap_bytes), *_fill(parameters[tail:], cap_bytes)]


def _fill(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Groups consecutive parameters of one dtype and device up to the capacity."""
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
    """Order of gradients in a pass, by parameter index.

    In the first pass, a bucket is sent again if a gradient arrives after it was sent.
    In later passes, buckets of parameters with several gradients are sent at the end.

    Attributes:
        came: number of gradients per parameter in this pass, in order of the first.
        late: parameters that got a gradient in this pass after their bucket was sent.
        last: parameters in order of their last gradient in the first pass.
        several: parameters that got several gradients in the first pass.
        is_agreed: True once all ranks follow one order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.last: dict[int, None] = {}
        self.came: dict[int, int] = {}
        self.late: set[int] = set()
        self.several: frozenset[int] = frozenset()
        self.is_agreed = False

    def begin(self) -> None:
        """Resets the counts at the begin of a pass."""
        self.came, self.late = {}, set()

    def agree(self, group: Group) -> tuple[list[int], list[int] | None]:
        """Compares the observations of the first pass; a collective call.

        Returns:
            Parameters with late gradients on any rank, and the order on the first rank
            that observed any; None if no rank did.
        """
        unseen = [at for at in range(len(self._names)) if at not in self.last]
        own = [*self.last, *unseen] if self.last else []
        ranks = gather_values(
            group, [own, sorted(self.late)], "agreeing on the order of gradients"
        )
        order = next((order for order, _ in ranks if order), None)
        return sorted({index for _, late in ranks for index in late}), order

    def learn(self) -> None:
        """Records, after the first pass, the parameters with several gradients."""
        self.several = frozenset(i for i, times in self.came.items() if times > 1)
        self.late.clear()

    def settle(self) -> None:
        """Fixes the agreed order for all later passes."""
        self.is_agreed = True
        self.last.clear()

    def is_alike(self, group: Group) -> bool:
        """True if all ranks of a group follow an agreed order, or none does."""
        what = "comparing the order of gradients"
        return len(set(gather_values(group, self.is_agreed, what))) == 1

    def refuse_late(self) -> NoReturn:
        """Refuses a completed pass whose reduction lacks gradients.

        Raises:
            ConfigError: always; names a parameter with a late gradient.
        """
        index = min(self.late)
        raise ConfigError(
            f"{self._names[index]} got {self.came[index]} gradients in this backward "
            "pass but at most one in the first, so the later ones missed the "
            "reduction; activation checkpointing needs use_reentrant=False where the "
            "number of uses of a layer differs between batches"
        )


def formats_agree(parameters: Sequence[nn.Parameter], group: Group) -> bool:
    """True if all ranks hold every parameter in the same memory format."""
    strided = [
        [index, *parameter.stride()]
        for index, parameter in enumerate(parameters)
        if not parameter.is_contiguous()
    ]
    ranks = gather_values(group, strided, "comparing memory formats")
    return all(each == strided for each in ranks)
