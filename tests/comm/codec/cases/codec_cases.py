"""What ranks do with encoded messages, in their own processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elche.comm.codec.coded_exchange import CodedExchange, open_coded_exchange
from elche.comm.transport.process_group import Group
from tests.comm.joined import joined
from tests.harness.rank_main import this_place


def offered(rank: int, number: int, numel: int) -> torch.Tensor:
    """What a rank sends in a round: elements and their weight, 1."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.cat([torch.randn(numel, generator=generator), torch.ones(1)])


def opened(group: Group, codec: str, numel: int) -> CodedExchange:
    exchange = open_coded_exchange(group, numel + 1, torch.float32, codec)
    assert isinstance(exchange, CodedExchange)
    return exchange


def reduced(exchange: CodedExchange, number: int, numel: int) -> torch.Tensor:
    message = offered(this_place().rank, number, numel)
    exchange.contribution(0).copy_(message)
    exchange.begin(0)
    exchange.poll()
    found = exchange.finish("a test").clone()
    exchange.release()
    assert torch.equal(exchange.contribution(0), message)
    return found


def leave(group: Group, exchange: CodedExchange) -> None:
    """Nobody closes its group before all have received."""
    exchange.flush("a test")
    group.all_reduce(torch.zeros(1), "all ranks to be through")


def many_sums(
    codec: str, numels: Sequence[int], rounds: int
) -> list[list[torch.Tensor]]:
    """Messages of several sizes, each through an exchange of its own."""
    found = []
    with joined("gloo") as group:
        for numel in numels:
            exchange = opened(group, codec, numel)
            found.append([reduced(exchange, number, numel) for number in range(rounds)])
            leave(group, exchange)
    return found


def beside_collectives(codec: str, rounds: int) -> list[torch.Tensor]:
    """Other sums begin meanwhile, on every rank at another moment of this one's."""
    rank, numel, sums = this_place().rank, 5000, []
    with joined("gloo") as group:
        exchange = opened(group, codec, numel)
        for number in range(rounds):
            exchange.contribution(0).copy_(offered(rank, number, numel))
            is_first = (rank + number) % 2 == 0
            beside = torch.full((10,), float(number))
            work = group.all_reduce_async(beside) if is_first else None
            exchange.begin(0)
            exchange.poll()
            if work is None:
                work = group.all_reduce_async(beside)
            if not is_first:
                group.wait(work, "beside")
            sums.append(exchange.finish("a test").clone())
            exchange.release()
            if is_first:
                group.wait(work, "beside")
            assert beside.tolist() == [float(number) * group.world_size] * 10
        leave(group, exchange)
    return sums


def uncoded() -> list[str]:
    """The kinds of exchange where encoding is not wanted, or not possible."""
    with joined("gloo") as group:
        made = [
            open_coded_exchange(group, 11, dtype, codec)
            for dtype, codec in ((torch.float32, "fp32"), (torch.float64, "int8"))
        ]
    return [type(each).__name__ for each in made]
