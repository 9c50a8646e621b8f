"""Collective construction of exchanges with encoded messages."""

from __future__ import annotations

import itertools

import torch

from elche.comm.codec.codec import codec_named
from elche.comm.codec.codec_peers import Peers
from elche.comm.codec.coded_exchange import CodedExchange
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.host_exchange import open_by_hosts
from elche.comm.transport.process_group import Group

AGREEING = "agreeing on the tags of a message"
TAGS_PER_EXCHANGE = 2
FIRST_OPENING = 1 << 20
"""First opening number; lower tags belong to other messages of the group."""
_openings = itertools.count(FIRST_OPENING)


def open_coded_exchange(
    group: Group,
    numel: int,
    dtype: torch.dtype,
    codec: str,
    sides: int = 1,
    *,
    exact: int = 0,
) -> Exchange:
    """Makes an exchange with encoded messages; a collective call.

    Falls back to an unencoded exchange for ``"fp32"``, for other dtypes than float32,
    and for one rank. That exchange sums inside hosts first, unless ``sides`` is 2.

    Args:
        group: process group of all ranks.
        numel: number of elements of a message; the last element is its weight.
        dtype: dtype of the message.
        codec: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"``; the same on all ranks.
        sides: 2 if training continues while a message is in flight.
        exact: number of elements before the weight that are sent as float32.

    Raises:
        ConfigError: no such codec exists.
    """
    chosen, cpu = codec_named(codec), torch.device("cpu")
    if codec != "fp32" and dtype == torch.float32 and group.world_size > 1:
        opening = torch.tensor([next(_openings)], device="cpu")
        group.broadcast(opening, AGREEING)  # a number that rank 0 has not used yet
        tag = TAGS_PER_EXCHANGE * int(opening)
        return CodedExchange(Peers(group), chosen, numel, tag, exact)
    if sides == 1:
        return open_by_hosts(group, numel, dtype, cpu)
    # A second side is for readers of shared memory.
    return open_exchange(group, numel, dtype, cpu, shared_sides=sides)
