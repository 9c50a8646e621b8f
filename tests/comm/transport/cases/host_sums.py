"""Messages summed inside hosts first, on each rank of pretended hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import Bucket, PassOptions
from elche.comm.transport import shared_memory
from elche.comm.transport.exchange import GlooExchange
from elche.comm.transport.host_exchange import (
    HostLeaders,
    open_by_hosts,
)
from elche.comm.transport.probe import probe_reduction_s
from elche.comm.transport.process_group import Group, end_left_groups
from elche.errors import CommunicationError
from tests.comm.joined import joined
from tests.harness.rank_main import this_place

CPU = torch.device("cpu")
NUMEL = 1003


@contextmanager
def joined_hosts() -> Iterator[Group]:
    """A group of all ranks, who may share memory with others of their hosts."""
    with ExitStack() as stack:

        def form(ranks: Sequence[int]) -> Group:
            made = joined("gloo", members=tuple(ranks), name="leaders")
            return stack.enter_context(made)

        with joined("gloo") as group:
            group.host_leaders = HostLeaders(group, form)
            yield group
        assert end_left_groups(10.0)


def messages_of(rank: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a rank sends."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(NUMEL, generator=generator, dtype=dtype) for _ in range(count)]


def summed(dtype: torch.dtype) -> list[torch.Tensor]:
    """Messages one after the other, as the buckets of a pass are: two are under way."""
    found: list[torch.Tensor] = []
    with joined_hosts() as group:
        pair = [open_by_hosts(group, NUMEL, dtype, CPU) for _ in range(2)]
        sent = messages_of(group.rank, 6, dtype)
        for first in range(0, 6, 2):
            for exchange, message in zip(pair, sent[first:], strict=False):
                exchange.reclaim("a test")
                exchange.contribution(0).copy_(message)
                exchange.begin(0)
                exchange.poll()
            found += [exchange.finish("a test").clone() for exchange in pair]
        group.all_reduce(torch.zeros(1), "the end")
    return found


def not_mapped(victim: int) -> bool:
    """Whether all ranks sum by gloo where one cannot map its host's memory."""
    if this_place().rank == victim:
        shared_memory._map = lambda *_: None
    with joined_hosts() as group:
        exchange = open_by_hosts(group, NUMEL, torch.float32, CPU)
        exchange.contribution(0).fill_(1.0)
        exchange.begin(0)
        right = bool((exchange.finish("a test") == group.world_size).all())
        again = open_by_hosts(group, NUMEL, torch.float32, CPU)
        group.all_reduce(torch.zeros(1), "the end")
        is_gloo = isinstance(exchange, GlooExchange) and isinstance(again, GlooExchange)
    return right and is_gloo


def probed() -> tuple[float, int, int]:
    """What a probe says, and the longest messages between all and between leaders."""
    longest = {"all": 0, "leaders": 0}

    def watch(group: Group, name: str) -> None:
        begin = group.all_reduce_async

        def watched(tensor: torch.Tensor) -> Any:
            longest[name] = max(longest[name], tensor.numel())
            return begin(tensor)

        group.all_reduce_async = watched  # type: ignore[method-assign]

    with joined_hosts() as group:
        form = group.host_leaders._form

        def formed(ranks: Sequence[int]) -> Group:
            watch(made := form(ranks), "leaders")
            return made

        group.host_leaders._form = formed
        watch(group, "all")
        found_s = probe_reduction_s(group, NUMEL)
        group.all_reduce(torch.zeros(1), "the end")
    return found_s, longest["all"], longest["leaders"]


def late(rank: int) -> str:
    """What the others say of a rank that does not come."""
    with joined_hosts() as group:
        exchange = open_by_hosts(group, NUMEL, torch.float32, CPU)
        group.timeout_s = 0.5
        said = ""
        if group.rank != rank:
            exchange.begin(0)
            try:
                exchange.finish("a test")
            except CommunicationError as error:
                said = str(error)
        group.timeout_s = 60.0
        group.all_reduce(torch.zeros(1), "the end")
    return said


def kind_of_bucket() -> str:
    """How a bucket is summed."""
    with joined_hosts() as group:
        bucket = Bucket([nn.Parameter(torch.ones(NUMEL))])
        bucket.open(group, PassOptions(1))
        return type(bucket.exchange).__name__


def handed_over_twice() -> list[torch.Tensor]:
    """The second sum: rank 0 takes it from the last rank, and gives it to rank 1."""
    with joined_hosts() as group:
        parameter = nn.Parameter(torch.ones(NUMEL, dtype=torch.float64))
        bucket = Bucket([parameter])
        bucket.open(group, PassOptions(1, keeps_sums=True))
        parameter.grad = messages_of(group.rank, 2, torch.float64)[0]
        bucket.send(1.0)
        bucket.finish()
        bucket.exchange.reclaim("a test")
        group.all_reduce(torch.zeros(1), "all have the first sum")
        parameter.grad = messages_of(group.rank, 2, torch.float64)[1]
        bucket.send(1.0)
        has_it = group.rank == group.world_size - 1
        assert bucket.exchange is not None
        if has_it:
            bucket.finish()
        elif group.rank == 0:  # it leads its host
            group.wait_until(bucket.exchange.poll, "the sum")
        bucket.adopt_sums(group, group.world_size - 1, lacks=not has_it)
        if group.rank == 0:
            bucket.rescale(2.0)  # as `p.grad` is changed
        bucket.adopt_sums(group, 0, lacks=group.rank == 1)
        group.all_reduce(torch.zeros(1), "the end")
    return [] if not bucket.summed else [bucket.summed[0].detach().clone()]
