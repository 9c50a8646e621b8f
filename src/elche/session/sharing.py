"""`elche.share`: this rank's part of n samples, in loops without a loader."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed as dist

from elche.cadence.call_shares import CallShares, Facts
from elche.devices.streams import synchronize
from elche.errors import ConfigError
from elche.runtime.emulation import sleep_until
from elche.session.process import process

clock_s = time.perf_counter
"""Clock (s) of the measurements, which tests replace."""


def share(n: int) -> range:
    """This rank's part of n samples, sized by delivered speed.

    For loops that draw their own batches and reduce through `elche.Replica` or
    `elche.DistributedDataParallel`::

        drawn = torch.randint(len(data) - 64, (n,))  # the same on every rank
        part = drawn[elche.share(n)]

    The parts of all ranks are adjacent and together cover ``range(n)``. The first split
    is equal. Later ones follow the time between two calls, without the waits in
    reductions; the times travel with the reductions. Every rank calls it with the same
    n, once for each batch. Every rank gets at least one sample if n is large enough;
    otherwise some parts are empty, and such a rank reduces with weight 0. A plain
    script gets ``range(n)``.

    Raises:
        ConfigError: n is not a whole number of at least 1, there is no group of ranks
            yet, or a run of `elche.setup` divides its loader's batches already.
    """
    if process.run is not None:
        raise ConfigError(
            "elche.share() is for loops without a loader: the loader of elche.setup "
            "yields this rank's share of each batch already"
        )
    place = _place()
    shares = process.shares
    if shares is None or shares.place != place:  # a group of other ranks
        emulation = process.placed().emulation
        least_s = None if emulation is None else emulation.pass_s
        shares = process.shares = CallShares(*place, least_s)
    sleep_until(shares.due_s)
    return shares.split(n, clock_s())


def own_facts() -> Facts:
    """This rank's report to the others; zeros if `share` is not in use."""
    return (0.0, 0.0, 0.0) if process.shares is None else process.shares.facts()


def note_facts(rows: Sequence[Sequence[float]]) -> None:
    """Records the reports of all ranks.

    Raises:
        ProtocolError: ranks called `share` differently.
    """
    if process.shares is not None:
        process.shares.report(rows)
    elif any(digest for _, _, digest in rows):
        CallShares(0, len(rows)).report(rows)  # raises: this rank never called it


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    """Excludes the block's time from the delivered time of the current part.

    Waits for this rank's own device first, whose work is delivered time.
    """
    shares = process.shares
    if shares is None:
        yield
        return
    synchronize(device)
    sleep_until(shares.due_s)
    began_s = clock_s()
    try:
        yield
    finally:
        shares.exclude_wait(clock_s() - began_s)


def _place() -> tuple[int, int]:
    """Rank and world size of the group whose ranks share batches."""
    if process.manual is not None:
        return process.manual.group.rank, process.manual.group.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    placement = process.placed()
    if placement.world_size > 1:
        raise ConfigError(
            "elche.share() needs a group of ranks: call elche.init_group first, or "
            "torch.distributed.init_process_group with elche.DistributedDataParallel"
        )
    return 0, 1
