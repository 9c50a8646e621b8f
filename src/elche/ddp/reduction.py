"""The communication hook of `elche.DistributedDataParallel`.

A rank knows its own weight when backward begins, not the others'. It sends its
gradients times w_r / T, where T is the total of the pass before, and in a small message
beside them its weight. The sum is multiplied by T / N, N being the true total, which
falls away where the total stays the same. In the first pass, and for float16, whose
range that could leave, ranks wait for N first.

All futures are completed inside the hook of the last bucket: the thread that computes
is the only one that waits, with a deadline.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from elche.comm.model_buffers.buffers import BufferWatch
from elche.comm.tensors.equal_tensors import broadcast_bits
from elche.comm.transport.exchange import Exchange, GlooExchange, open_exchange
from elche.ddp.group import TorchGroup
from elche.ddp.pass_weights import PassWeights
from elche.errors import MismatchError

Reduced = torch.futures.Future[torch.Tensor]
UserHook = Callable[[Any, dist.GradBucket], Reduced]
FACTS = 3
"""Numbers that each rank sends: its weight, buffers written (0 or 1), their layout."""
AGREEING = "agreeing on weights"
REDUCING = "reducing gradients"


@dataclass(frozen=True, slots=True)
class DdpReduction:
    """One reduction.

    Attributes:
        weights: of each rank; 0 for one that had nothing to contribute.
        wait_s: seconds from the last bucket to the last sum.
    """

    weights: tuple[float, ...]
    wait_s: float


@dataclass(slots=True)
class _Message:
    """A bucket under way: its memory flat and real, and as torch has it."""

    exchange: Exchange
    flat: torch.Tensor
    bucket: torch.Tensor
    future: Reduced


@final
class BufferBroadcast:
    """Keeps the buffers of one model equal on all ranks.

    torch's DistributedDataParallel broadcasts all buffers of rank 0 before a forward
    pass, so that an evaluation on one rank waits for the others. Here they are sent
    after a backward pass in which some rank has written one, from the lowest rank that
    had a batch.

    Args:
        model: the model; its present buffers are looked up at every call.
        ignored: names of buffers that stay local.
        group: the process group.
    """

    def __init__(
        self, model: nn.Module, ignored: frozenset[str], group: TorchGroup
    ) -> None:
        self._model = model
        self._ignored = ignored
        self._group = group
        self._watch = BufferWatch(model)

    def facts(self) -> tuple[float, float]:
        """1 if this rank wrote a buffer since the last broadcast; the layout's digest.

        Other names, shapes or dtypes have another digest.
        """
        names = [name for name, _ in self._model.named_buffers()]
        wrote = any(names[at] not in self._ignored for at in self._watch.written())
        layout = [(name, b.shape, b.dtype) for name, b in self._named()]
        return float(wrote), float(zlib.crc32(repr(layout).encode()))

    def send(self, layouts: Sequence[float], source: int) -> None:
        """Copies the buffers of rank ``source`` to all, with all ranks.

        Raises:
            MismatchError: the ranks' layouts differ.
            CommunicationError: it failed, or a rank did not arrive in time.
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
    """Reduces torch's gradient buckets by the weights of the ranks.

    Args:
        group: all ranks.
        passes: counts this rank's weight.
        buffers: broadcast after each reduction; None: they stay local.
        is_mean: the sum is divided by the total weight.
        has_float16: a gradient is float16.
        overlaps: buckets are sent when they are complete; else all after the last.

    Attributes:
        last: the last reduction.
        is_armed: torch's reducer expects a backward pass.
        is_under_way: it has begun, and not all sums are there; so it stays after an
            error.
        is_joining: the reduction is of what was accumulated alone.
        divides_by_world: the mean is divided by all ranks, not only by those that
            contributed.
        user_hook: takes the place of the exchange, with its state.
        at_end: called when a reduction has ended inside a backward pass, if given.
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
        self._control: Exchange | None = None
        self._exchanges: dict[int, tuple[tuple[int, torch.dtype], Exchange]] = {}
        self._complete: list[tuple[dist.GradBucket, Reduced]] = []
        self._sent: deque[_Message] = deque()
        self._is_local = False
        self._scale = 0.0
        self._reference = 0.0
        self._weights: tuple[float, ...] = ()
        self._layouts: tuple[float, ...] = ()
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
        """Reduces one bucket, and with the last one ends the reduction.

        Raises:
            CommunicationError: it failed, or a rank did not arrive in time.
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

    def _begin(self) -> None:
        """Sends this rank's weight, and whether it has written buffers."""
        group, buffers = self._group, self._buffers
        is_joining = self.is_joining or not self.is_armed
        self.is_armed = False
        weight, self._scale = self._passes.close(is_joining=is_joining)
        self._complete.clear()
        self._sent.clear()
        self._factor = None
        if self._control is None:
            self._control = open_exchange(
                group, FACTS * group.world_size, torch.float64, group.control_device
            )
        self._control.reclaim(AGREEING)
        facts = [weight, 0.0, 0.0]
        if buffers is not None:
            facts[1:] = buffers.facts()
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
        """The factor of every sum, once all ranks have sent what they weigh."""
        if self._factor is not None:
            return self._factor
        assert self._control is not None
        facts = self._control.finish(AGREEING).view(-1, FACTS).tolist()
        self._weights, written, layouts = zip(*facts, strict=True)
        self._layouts = layouts if any(written) else ()
        total, self._factor = sum(self._weights), 1.0
        if self._is_mean and total and self._reference:
            self._factor = self._reference / total
            if self.divides_by_world:
                share = sum(weight > 0 for weight in self._weights)
                self._factor *= share / len(self._weights)
        return self._factor

    def _send(self, bucket: dist.GradBucket, future: Reduced) -> _Message:
        buffer = bucket.buffer()
        flat = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        exchange = self._exchange(bucket.index(), flat)
        if isinstance(exchange, GlooExchange) and not self._group.is_mixed:
            exchange.renew(0, lambda: flat)  # summed in place
        else:
            exchange.reclaim(REDUCING)
        message = exchange.contribution(0)
        if self._scale == 0.0:
            message.zero_()  # and not 0 times what may be infinite
        elif message.device == flat.device:
            torch.mul(flat, self._scale, out=message)
        else:
            message.copy_(flat).mul_(self._scale)
        exchange.begin(0)
        return _Message(exchange, flat, buffer, future)

    def _exchange(self, index: int, flat: torch.Tensor) -> Exchange:
        """The exchange of a bucket, opened by all ranks when its size is new."""
        kind = flat.numel(), flat.dtype
        known = self._exchanges.get(index)
        if known is None or known[0] != kind:
            where = torch.device("cpu") if self._group.is_mixed else flat.device
            known = self._exchanges[index] = (
                kind,
                open_exchange(self._group, *kind, where),
            )
        return known[1]

    def _is_there(self, message: _Message) -> bool:
        """True if its sum can be taken without waiting."""
        assert self._control is not None
        has_weights = self._factor is not None or self._control.poll()
        return has_weights and message.exchange.poll()

    def _collect(self, message: _Message) -> None:
        """Waits for a sum, and completes its future."""
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
        """All sums are there."""
        self._agreed()
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
        """Torch's hooks divide by the number of ranks, which is made up for before."""
        share = self._group.world_size * self._scale
        if self._is_mean:
            self._agreed()
        bucket.buffer().mul_(share) if share else bucket.buffer().zero_()
        if bucket.is_last():
            self._end(0.0)
        return hook(state, bucket)
