"""The communication hook of `elche.DistributedDataParallel`.

When backward begins, a rank knows its own weight w_r but not the others'. It sends its
gradients times w_r / T, where T is the previous pass's total weight, and its weight in
a small message. The sum is then multiplied by T / N, where N is the true total; this
step is skipped if N equals T. In the first pass, and for float16, where T / N could
overflow, ranks wait for N first.

All futures are completed inside the hook of the last bucket, so only the computing
thread waits, with a deadline.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from elche.cadence.call_shares import FACTS as SHARE_FACTS
from elche.comm.model_buffers.buffers import BufferWatch
from elche.comm.tensors.equal_tensors import broadcast_bits
from elche.comm.transport.exchange import Exchange, GlooExchange, open_exchange
from elche.ddp.group import TorchGroup
from elche.ddp.pass_weights import PassWeights
from elche.devices.memory import widest_float
from elche.errors import MismatchError
from elche.session.process import process

Reduced = torch.futures.Future[torch.Tensor]
UserHook = Callable[[Any, dist.GradBucket], Reduced]
MESSAGES = 4
"""Messages in shared memory, used in turn; by default a quarter of the model."""
FACTS = 3 + SHARE_FACTS
"""Count of numbers per rank: weight, buffers written, buffer layout, and shares."""
AGREEING = "agreeing on weights"
REDUCING = "reducing gradients"


@dataclass(frozen=True, slots=True)
class DdpReduction:
    """Statistics of one reduction.

    Attributes:
        weights: weight of each rank; 0 for a rank that contributed nothing.
        wait_s: seconds from the last bucket to the last sum.
    """

    weights: tuple[float, ...]
    wait_s: float


@dataclass(slots=True)
class _Message:
    """A bucket in flight: its memory as flat real numbers, and torch's tensor."""

    exchange: Exchange
    flat: torch.Tensor
    bucket: torch.Tensor
    future: Reduced


@final
class BufferBroadcast:
    """Keeps the buffers of one model equal on all ranks.

    torch's DistributedDataParallel broadcasts rank 0's buffers before a forward pass,
    so an evaluation on one rank blocks on the others. Here the lowest rank with a batch
    broadcasts its buffers after a backward pass in which a rank has written one.

    Args:
        model: model whose current buffers are read at every call.
        ignored: names of buffers that stay local.
        group: process group of all ranks.
    """

    def __init__(
        self, model: nn.Module, ignored: frozenset[str], group: TorchGroup
    ) -> None:
        self._model = model
        self._ignored = ignored
        self._group = group
        self._watch = BufferWatch(model)

    def facts(self) -> tuple[float, float]:
        """Returns 1 if this rank wrote a buffer since the last broadcast, and a digest.

        The digest covers the names, shapes and dtypes of the buffers.
        """
        names = [name for name, _ in self._model.named_buffers()]
        wrote = any(names[at] not in self._ignored for at in self._watch.written())
        layout = [(name, b.shape, b.dtype) for name, b in self._named()]
        return float(wrote), float(zlib.crc32(repr(layout).encode()))

    def send(self, layouts: Sequence[float], source: int) -> None:
        """Broadcasts the buffers of rank ``source``; a collective call.

        Raises:
            MismatchError: the ranks' layouts differ.
            CommunicationError: the broadcast failed, or a rank timed out.
        """
        for rank, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise MismatchError(
                    f"the model has other buffers on rank {rank} than on rank 0: one "
                    "was added, removed or resized; do so on every rank, or keep "
                    "buffers local by forward_sync_buffers=False"
                )
        buffers = [buffer for _, buffer in self._named()]
        broadcast_bits(self._group, buffers, "broadcasting buffers", source)
        self._watch.mark()

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, buffer)
            for name, buffer in self._model.named_buffers()
            if name not in self._ignored
        ]


@final
class WeightedReduction:
    """Reduces torch's gradient buckets, weighted by rank.

    Args:
        group: process group of all ranks.
        passes: counter of this rank's weight.
        buffers: buffers to broadcast after each reduction; None: they stay local.
        is_mean: True if the sum is divided by the total weight.
        has_float16: True if a gradient is float16.
        overlaps: True to send each bucket once it is complete, else all after the last.

    Attributes:
        last: statistics of the last reduction.
        is_armed: True if torch's reducer expects a backward pass.
        is_under_way: True from the first bucket to the last sum; stays True after an
            error.
        is_joining: True if only accumulated gradients are reduced, without a batch.
        divides_by_world: True to divide the mean by all ranks, not only by those that
            contributed.
        user_hook: the user's state and hook, called in place of the exchange.
        at_end: optional callback at the end of a reduction inside a backward pass.
    """

    def __init__(
        self,
        group: TorchGroup,
        passes: PassWeights,
        buffers: BufferBroadcast | None,
        *,
        is_mean: bool,
        has_float16: bool,
        overlaps: bool,
    ) -> None:
        self._group = group
        self._passes = passes
        self._buffers = buffers
        self._is_mean = is_mean
        self._has_float16 = has_float16
        self._overlaps = overlaps
        self._exchanges: dict[tuple[int, torch.dtype], tuple[int, Exchange]] = {}
        self._complete: list[tuple[dist.GradBucket, Reduced]] = []
        self._sent: deque[_Message] = deque()
        self._is_local = False
        self._scale = 0.0
        self._reference = 0.0
        self._weights: tuple[float, ...] = ()
        self._layouts: tuple[float, ...] = ()
        self._shared: list[list[float]] = []
        self._factor: float | None = None
        self.last: DdpReduction | None = None
        self.is_armed = False
        self.is_under_way = False
        self.is_joining = False
        self.divides_by_world = False
        self.user_hook: tuple[Any, UserHook] | None = None
        self.at_end: weakref.WeakMethod[Callable[[], None]] | None = None

    @torch.no_grad()
    def reduce(self, bucket: dist.GradBucket) -> Reduced:
        """Reduces one bucket; the last bucket completes the reduction.

        Raises:
            CommunicationError: the reduction failed, or a rank timed out.
        """
        buffer, is_last = bucket.buffer(), bucket.is_last()
        devices: Any = [] if buffer.device.type == "cpu" else [buffer.device]
        future = torch.futures.Future[torch.Tensor](devices=devices)
        if bucket.index() == 0:
            self.is_under_way = True
            self._is_local = self.is_armed and self._passes.is_local()
            if not self._is_local:
                self._begin()
        if self._is_local:
            self.is_armed = self.is_under_way = False
            future.set_result(buffer)
            return future
        if self.user_hook is not None:
            return self._by_user_hook(bucket, *self.user_hook)
        self._complete.append((bucket, future))
        if self._overlaps or is_last:
            for each in self._complete:
                self._sent.append(self._send(*each))
            self._complete.clear()
        started_s = time.monotonic()
        while self._sent and (is_last or self._is_there(self._sent[0])):
            self._collect(self._sent.popleft())
        if is_last:
            self._end(time.monotonic() - started_s)
        return future

    @cached_property
    def _control(self) -> Exchange:
        """Message of all ranks' facts; opened by the first reduction, collectively."""
        device, numel = self._group.control_device, FACTS * self._group.world_size
        return open_exchange(self._group, numel, widest_float(device), device)

    def _begin(self) -> None:
        """Sends this rank's weight and buffer facts, and sets the gradients' scale."""
        group, buffers = self._group, self._buffers
        is_joining = self.is_joining or not self.is_armed
        self.is_armed = False
        weight, self._scale = self._passes.close(is_joining=is_joining)
        self._complete.clear()
        self._sent.clear()
        self._factor = None
        self._control.reclaim(AGREEING)
        facts = [weight, 0.0, 0.0, *process.shares.facts()]
        if buffers is not None:
            facts[1:3] = buffers.facts()
        if self.user_hook is not None:
            facts[3:5] = 0.0, 0.0  # its waits are not measured
        message = self._control.contribution(0).zero_().view(group.world_size, FACTS)
        message[group.rank] = torch.tensor(facts, dtype=torch.float64, device="cpu")
        self._control.begin(0)
        if not self._is_mean:
            return
        has_no_range = self._has_float16 or self.user_hook is not None
        if not self._reference or has_no_range:
            self._agreed()
            self._reference = sum(self._weights) or self._reference
            self._factor = None
        self._scale = self._scale / self._reference if self._reference else 0.0

    def _agreed(self) -> float:
        """Waits for the weights of all ranks; returns the factor of every sum."""
        if self._factor is not None:
            return self._factor
        facts = self._control.finish(AGREEING).view(-1, FACTS).tolist()
        self._weights, written, layouts, *_ = zip(*facts, strict=True)
        self._shared = [row[3:] for row in facts]
        self._layouts = layouts if any(written) else ()
        total, self._factor = sum(self._weights), 1.0
        if self._is_mean and total and self._reference:
            self._factor = self._reference / total
            if self.divides_by_world:
                share = sum(weight > 0 for weight in self._weights)
                self._factor *= share / len(self._weights)
        return self._factor

    def _send(self, bucket: dist.GradBucket, future: Reduced) -> _Message:
        buffer, index = bucket.buffer(), bucket.index()
        flat = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        at = index % MESSAGES if self._group.shares_host else index
        is_whole = index == 0 and bucket.is_last()  # until torch rebuilds its buckets
        place = -1 if is_whole else at, flat.dtype
        if not is_whole:
            self._exchanges.pop((-1, flat.dtype), None)
        size, exchange = self._exchanges.get(place, (-1, None))
        if exchange is None or size < flat.numel():
            exchange = open_exchange(self._group, flat.numel(), flat.dtype, flat.device)
            self._exchanges[place] = flat.numel(), exchange
        while any(each.exchange is exchange for each in self._sent):
            self._collect(self._sent.popleft())
        if isinstance(exchange, GlooExchange):  # summed in place, on a common device
            exchange.renew(0, lambda: flat.cpu() if self._group.is_mixed else flat)
        else:
            exchange.reclaim(REDUCING)
        message = exchange.contribution(0)[: flat.numel()]
        if self._scale == 0.0:
            message.zero_()  # not 0 times a value that may be infinite
        elif message.device == flat.device:
            torch.mul(flat, self._scale, out=message)
        else:
            message.copy_(flat).mul_(self._scale)
        exchange.begin(0)
        return _Message(exchange, flat, buffer, future)

    def _is_there(self, message: _Message) -> bool:
        """True if the bucket's sum can be collected without waiting."""
        has_weights = self._factor is not None or self._control.poll()
        return has_weights and message.exchange.poll()

    def _collect(self, message: _Message) -> None:
        """Waits for a bucket's sum and completes its future."""
        exchange, flat, factor = message.exchange, message.flat, self._agreed()
        if exchange.keeps_contribution:
            exchange.wait(REDUCING)
            exchange.sum_into(0, flat.numel(), flat)
            exchange.release()
        elif (total := exchange.finish(REDUCING)) is not flat:
            flat.copy_(total)
        if factor != 1.0:
            flat.mul_(factor)
        message.future.set_result(message.bucket)

    def _end(self, wait_s: float) -> None:
        """Finishes the reduction: records it, broadcasts buffers, calls `at_end`."""
        self._agreed()
        process.shares.report(self._shared)
        weights = self._weights
        self._reference = sum(weights) or self._reference
        self.last = DdpReduction(weights, wait_s)
        self._passes.sent = None
        source = next((rank for rank, weight in enumerate(weights) if weight), None)
        if self._buffers is not None and self._layouts and source is not None:
            self._buffers.send(self._layouts, source)
        self.is_under_way = False
        at_end = None if self.at_end is None or self.is_joining else self.at_end()
        if at_end is not None:
            at_end()

    def _by_user_hook(
        self, bucket: dist.GradBucket, state: Any, hook: UserHook
    ) -> Reduced:
        """Runs the user's hook on gradients scaled by the world size.

        Torch's hooks divide by the world size.
        """
        share = self._group.world_size * self._scale
        if self._is_mean:
            self._agreed()
        bucket.buffer().mul_(share) if share else bucket.buffer().zero_()
        if bucket.is_last():
            self._end(0.0)
        return hook(state, bucket)
