"""Collective construction of exchanges with encoded messages."""

from __future__ import annotations

import itertools
import logging

import torch

from elche.comm.codec.background_exchange import BackgroundExchange
from elche.comm.codec.codec import CODECS, Codec, codec_named
from elche.comm.codec.codec_peers import GroupPeers
from elche.comm.codec.codec_thread import codec_thread_of
from elche.comm.codec.coded_exchange import CodedExchange
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.host_exchange import spans_hosts
from elche.comm.transport.process_group import Group
from elche.comm.transport.shared_memory import Members
from elche.errors import MismatchError

AGREEING = "agreeing on a codec"
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
TAGS_PER_EXCHANGE = 4
FIRST_OPENING = 1 << 20
"""Tags below belong to whoever else sends in the group."""
_openings = itertools.count(FIRST_OPENING)
_log = logging.getLogger(__name__)


def open_coded_exchange(
    group: Group,
    numel: int,
    dtype: torch.dtype,
    codec: str,
    sides: int = 1,
    *,
    exact: int = 0,
    sums: int = 0,
) -> Exchange:
    """Makes an exchange whose messages travel encoded, together with all ranks.

    A plain one (:func:`open_exchange`) where encoding is not wanted or not possible:
    for elements that are not float32, for one rank, and for ``"fp32"``, unless the
    ranks are on several hosts and some of them share one: then float32 elements too are
    summed inside the hosts first (`host_routes`), and only what travels between hosts
    is encoded.

    Args:
        group: the process group.
        numel: elements of a message; the last one is its weight.
        dtype: of the message.
        codec: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"``; the same on all ranks.
        sides: with two, training goes on while a message is under way, and a thread of
            the group does what there is to do for it.
        exact: elements before the weight that travel as they are.
        sums: memory for so many sums, beside the contribution.

    Raises:
        ConfigError: there is no such codec.
        MismatchError: the ranks ask for different messages; the error names them.
    """
    chosen, cpu = codec_named(codec), torch.device("cpu")
    # In a plain one a second side is for readers of shared memory.
    if group.world_size == 1:
        return open_exchange(group, numel, dtype, cpu, shared_sides=sides)
    opening = _agree(group, chosen, dtype, numel, sides)
    hosts = group.hosts() if dtype == torch.float32 else ()
    if dtype != torch.float32 or (codec == "fp32" and not spans_hosts(hosts)):
        return open_exchange(group, numel, dtype, cpu, shared_sides=sides)
    tag = TAGS_PER_EXCHANGE * opening
    if spans_hosts(hosts) and group.rank == 0:
        _log.info(
            "%d ranks on %d hosts: sums are formed inside the hosts first, and "
            "travel between them in %s",
            group.world_size,
            len(set(hosts)),
            codec,
        )
    made = CodedExchange(GroupPeers(group), chosen, numel, tag, hosts, exact)
    if sides == 1:
        return made
    own = [torch.zeros(numel, dtype=dtype, device=cpu) for _ in range(sums)]
    return BackgroundExchange(made, codec_thread_of(group), own)


def _agree(
    group: Members, codec: Codec, dtype: torch.dtype, numel: int, sides: int
) -> int:
    """Compares what ranks want; returns a number that rank 0 has not used before."""
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
