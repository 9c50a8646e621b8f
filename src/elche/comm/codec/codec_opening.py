"""Collective construction of exchanges with encoded messages."""

from __future__ import annotations

import itertools

import torch

from elche.comm.codec.codec import CODECS, Codec, codec_named
from elche.comm.codec.codec_peers import GroupPeers
from elche.comm.codec.coded_exchange import CodedExchange
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.host_exchange import open_by_hosts
from elche.comm.transport.process_group import Group
from elche.comm.transport.shared_memory import Members
from elche.errors import MismatchError

AGREEING = "agreeing on a codec"
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
TAGS_PER_EXCHANGE = 2
FIRST_OPENING = 1 << 20
"""First tag of exchanges; lower ones belong to other senders of the group."""
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
    """Makes an exchange whose messages travel encoded, together with all ranks.

    It is a plain one for ``"fp32"``, for elements that are not float32, and for one
    rank; ranks that share a host are summed there first, unless sums are overlapped.

    Args:
        group: the process group.
        numel: elements of a message; the last one is its weight.
        dtype: dtype of the message.
        codec: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"``; the same on all ranks.
        sides: 2 if training continues while a message is under way.
        exact: elements before the weight that travel as float32.

    Raises:
        ConfigError: no such codec exists.
        MismatchError: the ranks ask for different messages; the error names them.
    """
    chosen, cpu = codec_named(codec), torch.device("cpu")
    if group.world_size == 1:
        return open_exchange(group, numel, dtype, cpu, shared_sides=sides)
    opening = _agree(group, chosen, dtype, numel, sides)
    if codec != "fp32" and dtype == torch.float32:
        tag = TAGS_PER_EXCHANGE * opening
        return CodedExchange(GroupPeers(group), chosen, numel, tag, exact)
    if sides == 1:
        return open_by_hosts(group, numel, dtype, cpu)
    # A second side is for readers of shared memory.
    return open_exchange(group, numel, dtype, cpu, shared_sides=sides)


def _agree(
    group: Members, codec: Codec, dtype: torch.dtype, numel: int, sides: int
) -> int:
    """Compares the ranks' requests; returns a number that rank 0 has not used yet."""
    kind = DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)
    wanted = [list(CODECS).index(codec.name), codec.block, numel, kind, sides]
    rows = torch.zeros(
        group.world_size, len(wanted) + 1, dtype=torch.int64, device="cpu"
    )
    rows[group.rank] = torch.tensor([*wanted, next(_openings)], device="cpu")
    group.all_reduce(rows, AGREEING)
    first, *others = (row[:-1] for row in rows.tolist())
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise MismatchError(
                f"ranks disagree about a message: rank 0 has {_described(first)}, "
                f"rank {rank} has {_described(other)}"
            )
    return int(rows[0, -1])


def _described(row: list[int]) -> str:
    index, block, numel, kind, sides = row
    dtype = str(DTYPES[kind]).removeprefix("torch.") if kind < len(DTYPES) else "?"
    of = "" if kind == 0 else f" of {dtype}"
    way = ", overlapped" if sides > 1 else ""
    return f"{numel} elements{of} in {list(CODECS)[index]}, blocks of {block}{way}"
