"""Pieces of the journal as bytes, for the next coordinator, here or on another host.

msgpack with each field checked: what comes from another host is never unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from elche.coordination.journal import Entry, RunRecord
from elche.coordination.protocol.wire import FROM_JOURNAL, from_wire, to_wire
from elche.errors import ProtocolError


def pack_piece(
    entries: Sequence[Entry], record: RunRecord, *, says_told: bool = False
) -> bytes:
    """Entries as bytes.

    Args:
        entries: what the record took.
        record: as it is after them.
        says_told: how many instructions each rank has is said as well, so that the next
            coordinator does not keep them.
    """
    rows = [(each.source, each.now_s, to_wire(each.what)) for each in entries]
    told = [(r, s.told.taken) for r, s in record.streams.items()] if says_told else []
    data: bytes = msgpack.packb((rows, told), use_bin_type=True)
    return data


def replay_piece(record: RunRecord, data: bytes) -> None:
    """Has a record take what another one took.

    Raises:
        ProtocolError: these are no entries.
    """
    try:
        rows, told = msgpack.unpackb(data, raw=False)
        entries = [
            Entry(source, from_wire(what, FROM_JOURNAL), float(now_s))
            for source, now_s, what in rows
        ]
        counts = [(int(rank), int(count)) for rank, count in told]
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"a piece of the journal is none: {error}") from error
    record.replay(entries)
    for rank, count in counts:
        if rank in record.streams:
            record.streams[rank].told.acknowledge(count)
