"""What ranks do with encoded messages, in their own processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elche.comm.codec.background_exchange import BackgroundExchange
from elche.comm.codec.codec import CODECS
from elche.comm.codec.codec_choice import measured_codec
from elche.comm.codec.codec_opening import open_coded_exchange
from elche.comm.codec.codec_routes import sent_bytes
from elche.comm.codec.residual_exchange import ResidualExchange
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, MismatchError
from tests.comm.averaging.cases.overlap_cases import joined
from tests.distributed.patience import all_here, lose_patience
from tests.harness.rank_main import this_place


@dataclass
class Seen:
    """What a rank got.

    Attributes:
        sums: of each round.
        sent_bytes: by the exchange, and as predicted.
        error: how a reduction failed.
        state: the residual in the end.
        threads: beside the training thread, with a message under way and then.
    """

    sums: list[torch.Tensor] = field(default_factory=list)
    sent_bytes: tuple[int, int] = (0, 0)
    error: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    threads: list[int] = field(default_factory=lambda: [0, 0])


def offered(rank: int, number: int, numel: int) -> torch.Tensor:
    """What a rank sends in a round: elements and their weight, 1."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.cat([torch.randn(numel, generator=generator), torch.ones(1)])


def opened(group: Group, codec: str, numel: int, sides: int = 1) -> ResidualExchange:
    exchange = open_coded_exchange(group, numel + 1, torch.float32, codec, sides)
    assert isinstance(exchange, ResidualExchange)
    return exchange


def reduced(exchange: ResidualExchange, number: int, numel: int) -> torch.Tensor:
    message = offered(this_place().rank, number, numel)
    begin(exchange, message)
    exchange.poll()
    found = exchange.finish("a test").clone()
    assert torch.equal(exchange.contribution(0), message)
    return found


def begin(exchange: ResidualExchange, message: torch.Tensor) -> None:
    if isinstance(exchange, BackgroundExchange):
        exchange.settle()
    exchange.contribution(0).copy_(message)
    exchange.begin(0)


def leave(group: Group, exchange: ResidualExchange) -> None:
    """Nobody closes its group before all have received."""
    exchange.flush("a test")
    group.all_reduce(torch.zeros(1), "all ranks to be through")


def many_sums(codec: str, numels: Sequence[int], rounds: int) -> list[Seen]:
    """Messages of several sizes, each through an exchange of its own."""
    found = []
    with joined("gloo") as group:
        for numel in numels:
            exchange, seen = opened(group, codec, numel, sides=2), Seen()
            seen.sums = [reduced(exchange, number, numel) for number in range(rounds)]
            predicted = sent_bytes(CODECS[codec], numel, group.world_size, group.rank)
            seen.sent_bytes = (exchange.sent_bytes, rounds * predicted)
            leave(group, exchange)
            found.append(seen)
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
            if is_first:
                group.wait(work, "beside")
            assert beside.tolist() == [float(number) * group.world_size] * 10
        leave(group, exchange)
    return sums


def bereaved(codec: str, numel: int, sides: int = 1) -> Seen:
    """The last rank dies when it has begun; the others go on without it."""
    place, seen = this_place(), Seen()
    last = place.world_size - 1
    with joined("gloo") as group:
        exchange = opened(group, codec, numel, sides)
        seen.sums.append(reduced(exchange, 0, numel))
        group.all_reduce(torch.zeros(1), "all ranks to be through")
        if place.rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            begin(exchange, offered(place.rank, 1, numel))
            exchange.wait("a test")
        except CommunicationError as error:
            seen.error = str(error)
        committed = exchange.state_dict()
    if last == 1:
        return seen
    with joined("gloo", members=tuple(range(last))) as group:
        exchange = opened(group, codec, numel, sides)
        exchange.load_state_dict(committed)
        seen.sums.append(reduced(exchange, 1, numel))
        seen.state = exchange.state_dict()
        leave(group, exchange)
    return seen


def stood_up(codec: str, numel: int, folder: str, *, waits: bool) -> Seen:
    """The last rank does not begin; the others wait for it in vain, or close."""
    place, seen = this_place(), Seen()
    with joined("gloo") as group:
        exchange = opened(group, codec, numel, sides=2)
        seen.sums.append(reduced(exchange, 0, numel))
        all_here(folder)
        if place.rank < place.world_size - 1:
            lose_patience(group, 0.5)
            begin(exchange, offered(place.rank, 1, numel))
            if waits:
                try:
                    exchange.wait("a test")
                except CommunicationError as error:
                    seen.error = str(error)
            seen.state = exchange.state_dict()
            seen.threads[0] = codec_threads()
    seen.threads[1] = codec_threads()
    all_here(folder, "through")
    return seen


def codec_threads() -> int:
    return sum(each.name.startswith("elche codec") for each in threading.enumerate())


def disagreeing(codecs: Sequence[str], numels: Sequence[int]) -> str:
    """Every rank asks for its own; what it is told."""
    rank = this_place().rank
    with joined("gloo") as group:
        try:
            opened(group, codecs[rank], numels[rank])
        except MismatchError as error:
            return str(error)
    return ""


def chosen() -> str:
    """What ``auto`` chooses here, whatever this machine is busy with."""
    with joined("gloo") as group:
        return measured_codec(group, 100_000)


def uncoded() -> list[str]:
    """The kinds of exchange where encoding is not wanted, or not possible."""
    with joined("gloo") as group:
        made = [
            open_coded_exchange(group, 11, dtype, codec)
            for dtype, codec in ((torch.float32, "fp32"), (torch.float64, "int8"))
        ]
    return [type(each).__name__ for each in made]
