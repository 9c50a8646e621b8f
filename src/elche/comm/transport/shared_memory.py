"""Anonymous memory that all ranks of one host map.

It has no name, so nothing remains however the ranks end. Only processes of the same
user can open it.
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
    """Rounds a size up to whole cache lines."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def map_together(group: Group, size_bytes: int, source: int = 0) -> mmap.mmap | None:
    """Maps zeroed memory of one rank on several; a collective call.

    Returns None if any rank cannot map it; then the group's ``shares_host`` becomes
    False.

    Args:
        group: process group of all ranks.
        size_bytes: size of the memory.
        source: place of the rank that creates the memory: the same for all ranks, or
            for all ranks of a host.
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
    finally:  # also if a rank dies meanwhile
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
    """Opens another process's memory; None if it cannot be opened or does not match.

    The token distinguishes it from an unrelated file, e.g. on another host.

    Args:
        pid: ID of the process that created the memory.
        descriptor: descriptor of the memory in that process.
        token: token that the process wrote to the memory.
        place: byte offset of the token.

    Returns:
        A descriptor, which the caller closes.
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
    """Creates anonymous memory, followed by a token.

    Args:
        size_bytes: size of the memory, and offset of the token.

    Returns:
        The descriptor and the token.

    Raises:
        OSError: the memory cannot be created.
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
    """Returns a number for this host: process IDs are only valid on one host."""
    return zlib.crc32(host_name().encode())


def may_share_memory() -> bool:
    """True if the system has anonymous memory, and cores see writes in order."""
    return platform.machine() in ORDERED_MACHINES and hasattr(os, "memfd_create")
