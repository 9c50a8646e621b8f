"""Gradients reduced during backward, weighted by samples.

Every rank scales its gradient of the *mean* loss over its n_r samples by n_r / N and
the group sums, which gives the gradient of the mean over the union batch of N samples,
whatever the shares. Buckets are filled in the order in which gradients appear (guessed
as the reverse of definition, then as observed in the first backward) and reduced as
soon as they are full, so that all but the last overlap with backward. A bucket also
carries one flag per parameter: a parameter that no rank used keeps ``grad=None``.

Reductions are out of place. A rank's own gradients stay untouched until every bucket
has arrived, and are kept until the next backward's reduction; then ``p.grad`` becomes a
view of the reduced bucket. Two bucket sets take turns, so accumulating into that view
reads one set while the other is reduced. Cost: two gradient copies beside ``p.grad``,
or four where ranks sum in shared memory. A ``p.grad`` kept by reference is overwritten
two backward passes later.

torch's own DistributedDataParallel divides by the world size and cannot weigh; that is
why this one exists.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elche.comm.buffers import BufferAverager
from elche.comm.exchange import Exchange, open_exchange
from elche.comm.process_group import Group
from elche.errors import CommunicationError, ConfigError


@dataclass(slots=True)
class _Bucket:
    """Parameters reduced in one message, with views of what is sent and summed."""

    parameters: list[nn.Parameter]
    exchange: Exchange | None = None
    sent: list[list[torch.Tensor]] = field(default_factory=list)
    summed: list[list[torch.Tensor]] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)

    def open(self, group: Group) -> None:
        """Makes the exchange: the gradients, then a flag per parameter."""
        first = self.parameters[0]
        numel = sum(p.numel() for p in self.parameters) + len(self.parameters)
        self.exchange = open_exchange(group, numel, first.dtype, first.device, sides=2)
        for side in range(2):
            self.sent.append(self._views(self.exchange.contribution(side)))
            self.summed.append(self._views(self.exchange.result(side)))

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A view per parameter, shaped like it, and the flags."""
        at, views = 0, []
        for parameter in self.parameters:
            part = flat[at : at + parameter.numel()]
            views.append(_shaped_like(part, parameter))
            at += parameter.numel()
        return [*views, flat[at:]]


class GradientReducer:
    """Reduces the gradients of one model in every backward of a step.

    Args:
        parameters: the model's trainable parameters, each once, as defined.
        group: the process group.
        bucket_cap_bytes: most bytes of gradients in one message.
        buffers: averages the model's buffers after the gradients, if it has any.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        bucket_cap_bytes: int,
        buffers: BufferAverager | None = None,
    ) -> None:
        self._group = group
        self._buffers = buffers
        self._parameters = list(parameters)
        self._cap_bytes = bucket_cap_bytes
        self._buckets: list[_Bucket] = []
        self._place: dict[int, tuple[_Bucket, int]] = {}
        self._observed: dict[int, None] | None = {}
        self._given: dict[int, torch.Tensor | None] = {}
        self._handles: list[Any] = []
        self._scale: float | None = None
        self._active_ranks = 0
        self._side = 0
        self._next_bucket = 0
        self._in_backward = False
        self._kept: list[torch.Tensor | None] = []
        self.wait_s = 0.0
        self.backward_passes = 0

    @property
    def bucket_sizes_bytes(self) -> list[int]:
        """Bytes of gradients per bucket, in order of reduction."""
        return [
            sum(_bytes(parameter) for parameter in bucket.parameters)
            for bucket in self._buckets
        ]

    @property
    def extra_bytes(self) -> int:
        """Memory of the buckets: what is sent and what is summed, twice each."""
        return 4 * sum(self.bucket_sizes_bytes)

    def attach(self) -> None:
        """Allocates buckets and hooks every parameter.

        Raises:
            ConfigError: there is no parameter.
        """
        if not self._parameters:
            raise ConfigError("the model has no parameter that requires a gradient")
        self._build(self._parameters[::-1])
        for parameter in self._parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
            self._handles.append(hook)

    def _build(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes buckets for parameters in the order in which gradients appear."""
        self._buckets = make_buckets(parameters, self._cap_bytes)
        for bucket in self._buckets:
            bucket.open(self._group)
            for index, parameter in enumerate(bucket.parameters):
                self._place[id(parameter)] = bucket, index

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_step(self, scale: float, active_ranks: int) -> None:
        """Says how this rank's gradients weigh until :meth:`end_step`.

        Args:
            scale: n_r / N; 0 for a rank without samples, which sends zeros.
            active_ranks: ranks that have samples in this step.

        Raises:
            CommunicationError: the backward pass before was broken off.
        """
        self._refuse_broken_backward()
        self._scale = scale
        self._active_ranks = active_ranks
        self.wait_s = 0.0

    def end_step(self) -> None:
        """Backward passes after this are the user's own and not reduced.

        Raises:
            CommunicationError: the step's backward pass was broken off.
        """
        self._scale = None
        self._refuse_broken_backward()

    def _refuse_broken_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            raise CommunicationError(
                "a backward pass was broken off by an error that the loop caught; its "
                "reduction cannot be completed, so the run cannot go on"
            )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._scale is None:
            return
        if not self._in_backward:
            self._begin_backward()
        if self._observed is not None:
            self._observed.setdefault(id(parameter))
        bucket, index = self._place[id(parameter)]
        if index in bucket.ready:
            raise ConfigError(
                "a parameter's gradient came twice in one backward pass, the second "
                "time too late for the reduction; activation checkpointing needs "
                "use_reentrant=False"
            )
        bucket.pending.discard(index)
        bucket.ready.add(index)
        while (
            self._next_bucket < len(self._buckets)
            and not self._buckets[self._next_bucket].pending
        ):
            self._launch_next()

    def _begin_backward(self) -> None:
        self._in_backward = True
        self.backward_passes += 1
        self._side = 1 - self._side
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.pending = set(range(len(bucket.parameters)))
            bucket.ready = set()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next_bucket]
        assert self._scale is not None
        assert bucket.exchange is not None
        sent = bucket.sent[self._side]
        flags = [0.0] * len(bucket.parameters)
        with torch.no_grad():
            for index, parameter in enumerate(bucket.parameters):
                if parameter.grad is None or self._scale == 0.0:
                    sent[index].zero_()
                else:
                    torch.mul(parameter.grad, self._scale, out=sent[index])
                    flags[index] = float(index in bucket.ready)
            if all(flags):
                sent[-1].fill_(1.0)
            else:
                sent[-1].copy_(torch.tensor(flags))
        bucket.exchange.begin(self._side)
        for earlier in self._buckets[: self._next_bucket]:
            if earlier.exchange is not None:
                earlier.exchange.advance()
        self._next_bucket += 1

    def _finish(self) -> None:
        """End of backward: reduce what is left, wait, and hand out the means."""
        self._in_backward = False
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        started_s = time.perf_counter()
        for bucket in self._buckets:
            assert bucket.exchange is not None
            bucket.exchange.finish("the reduction of gradients")
        if self._buffers is not None:
            self._buffers.average(self._active_ranks, mine=self._scale != 0.0)
        self.wait_s += time.perf_counter() - started_s
        self._hand_out()
        if self._observed is not None:
            self._rebuild(list(self._observed))

    def _hand_out(self) -> None:
        """Gives every parameter that any rank used its mean gradient.

        A rank without samples drops gradients of its own that nobody else has.
        """
        kept: list[torch.Tensor | None] = []
        for bucket in self._buckets:
            summed = bucket.summed[self._side]
            used = summed[-1].tolist()
            for index, parameter in enumerate(bucket.parameters):
                own = parameter.grad
                kept.append(own)
                held = own is not None and (
                    self._scale != 0.0 or own is self._given.get(id(parameter))
                )
                mean = summed[index] if used[index] or held else None
                parameter.grad = self._given[id(parameter)] = mean
        self._kept = kept

    def _rebuild(self, observed: list[int]) -> None:
        """Orders buckets as gradients appeared on rank 0 in the first backward."""
        places = {id(parameter): at for at, parameter in enumerate(self._parameters)}
        seen = [places[key] for key in observed]
        order = seen + [at for at in range(len(places)) if at not in set(seen)]
        message = torch.tensor(order, dtype=torch.int64)
        self._group.broadcast(message, "agreeing on the order of gradients")
        self._observed = None
        self._build([self._parameters[at] for at in message.tolist()])


def make_buckets(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[_Bucket]:
    """Buckets of parameters in the given order, one dtype and device each.

    Nothing hides the bucket that is reduced last, so the last parameters (up to a
    quarter of the cap, at least one) get one of their own.
    """
    tail, tail_bytes = len(parameters) - 1, _bytes(parameters[-1])
    while tail > 0 and tail_bytes + _bytes(parameters[tail - 1]) <= cap_bytes // 4:
        tail -= 1
        tail_bytes += _bytes(parameters[tail])
    return [*_fill(parameters[:tail], cap_bytes), *_fill(parameters[tail:], cap_bytes)]


def _fill(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[_Bucket]:
    """Consecutive parameters of one kind together, as long as they fit."""
    buckets: list[_Bucket] = []
    filled = 0
    for parameter in parameters:
        last = buckets[-1].parameters[-1] if buckets else None
        same = last is not None and (last.dtype, last.device) == (
            parameter.dtype,
            parameter.device,
        )
        if not same or filled + _bytes(parameter) > cap_bytes:
            buckets.append(_Bucket([]))
            filled = 0
        buckets[-1].parameters.append(parameter)
        filled += _bytes(parameter)
    return buckets


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _shaped_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of ``flat`` with the parameter's shape, and its strides if dense."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a permutation of dimensions makes the tensor contiguous."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
