"""Memory that all ranks of one host map.

It has no name, so nothing is left behind however the ranks end; only processes of the
same user can open it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import struct
import zlib

import torch

from elche.comm.control.addresses import host_name
from elche.comm.transport.process_group import Group

ALIGN_BYTES = 64
ORDERED_MACHINES = ("x86_64", "AMD64")
_TOKEN = struct.Struct("q")


def aligned(size_bytes: int) -> int:
    """The size, rounded up to whole cache lines."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def map_together(group: Group, size_bytes: int, source: int = 0) -> mmap.mmap | None:
    """Memory of one rank that others map, zeroed; None if one of them cannot.

    Must be called by all ranks of the group. If it gives None, the group's
    ``shares_host`` is False from then on.

    Args:
        group: the process group.
        size_bytes: of the memory.
        source: place of the rank whose memory it is: the same for all, or for all of a
            host.
    """
    descriptor, token = -1, 0
    if group.rank == source:
        with contextlib.suppress(OSError):
            descriptor, token = new_memory(size_bytes)
    host = host_number()
    where = torch.zeros(group.world_size, 4, dtype=torch.int64, device="cpu")
    if group.rank == source:
        mine = os.getpid(), descriptor, token, host
        where[group.rank] = torch.tensor(mine, device="cpu")
    try:
        group.all_reduce(where, "sharing memory")
        pid, number, token, host_of_memory = where[source].tolist()
        same_host = host_of_memory == host
        memory = _map(pid, number, token, size_bytes) if same_host else None
        missing = torch.tensor([int(memory is None)], device="cpu")
        group.all_reduce(missing, "agreeing on shared memory")
    finally:  # also where a rank dies meanwhile
        if descriptor >= 0:
            os.close(descriptor)
    if int(missing):
        group.shares_host = False
        return None
    return memory


def _map(pid: int, descriptor: int, token: int, size_bytes: int) -> mmap.mmap | None:
    opened = open_memory(pid, descriptor, token, size_bytes)
    if opened is None:
        return None
    try:
        return mmap.mmap(opened, size_bytes)
    except OSError:
        return None
    finally:
        os.close(opened)


def open_memory(pid: int, descriptor: int, token: int, place: int) -> int | None:
    """Opens the memory that another process holds; None if it is not that one.

    The token tells it from a file that happens to be there on another host.

    Args:
        pid: of the process that made it.
        descriptor: its number there.
        token: that it wrote...
        place: ...at this byte.

    Returns:
        A descriptor, for the caller to close.
    """
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.pread(opened, _TOKEN.size, place) == _TOKEN.pack(token):
            return opened
    os.close(opened)
    return None


def new_memory(size_bytes: int) -> tuple[int, int]:
    """Memory without a name, with a token behind it.

    Args:
        size_bytes: where the token stands.

    Returns:
        Its descriptor, and the token.

    Raises:
        OSError: there is none.
    """
    token = secrets.randbits(62)
    descriptor = os.memfd_create("elche")
    try:
        os.ftruncate(descriptor, size_bytes)
        os.pwrite(descriptor, _TOKEN.pack(token), size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, token


def host_number() -> int:
    """Tells hosts apart: a pid means another process on another one."""
    return zlib.crc32(host_name().encode())


def may_share_memory() -> bool:
    """True if there is such memory, and other cores see writes to it in order."""
    return platform.machine() in ORDERED_MACHINES and hasattr(os, "memfd_create")
