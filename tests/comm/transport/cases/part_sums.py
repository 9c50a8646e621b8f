"""Messages summed in parts, on each rank of one host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elche.comm.transport import exchange as transport
from elche.comm.transport.exchange import SharedExchange, open_exchange
from elche.errors import CommunicationError
from tests.comm.joined import joined
from tests.distributed.cases.deaths import Death, plan_death
from tests.harness.rank_main import this_place

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
PLACES = {
    "before its contribution": 11,
    "after its contribution": 11,
    "before a part": 11,
    "before its counter": 1,  # later ones may be of a late part
    "after a part": 11,
    "after a sum": 11,
}
"""Where a rank dies, and at which message."""
COUNT = 15
NUMEL = 5003
TIMEOUT_S = 3.0


def messages_of(
    ranks: int, numel: int, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """What ranks send."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(ranks)
    ]


def whole_sum(sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the ranks."""
    total = sent[0] + sent[1]
    for each in sent[2:]:
        total += each
    return total


def summed(place: str, victim: int) -> tuple[str, int, int]:
    """Sums messages; returns why it ended, others' parts read, and whole sums."""
    rank, ranks = this_place().rank, this_place().world_size
    transport.LEAST_RANKS = transport.LEAST_BYTES = 0
    if place and rank == victim:
        plan_death(Death(victim, place, PLACES[place]), {})
    found, parts, sums = "", 0, 0
    with joined("shared", timeout_s=TIMEOUT_S if place else 60.0) as group:
        for dtype in DTYPES:
            exchange = open_exchange(group, NUMEL, dtype, CPU)
            assert isinstance(exchange, SharedExchange)
            for number in range(COUNT):
                sent = messages_of(ranks, NUMEL, dtype, number)
                try:
                    exchange.reclaim("a test")
                    exchange.contribution(0).copy_(sent[rank])
                    exchange.begin(0)
                    exchange.wait("a test")
                except CommunicationError as error:
                    found = str(error)
                    break
                parts += sum(at == exchange._number for at in exchange._summed) - 1
                assert torch.equal(exchange.finish("a test"), whole_sum(sent))
                sums += 1
            if found:
                group.leave()
                break
    return found, parts, sums
