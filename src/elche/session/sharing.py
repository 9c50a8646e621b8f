"""`elche.share`: this rank's part of n samples, in loops without a loader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist

from elche.cadence.call_shares import CallShares
from elche.devices.streams import record_event
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

    The parts are adjacent and cover ``range(n)``: equal at first, then by the time
    between two calls without the waits in reductions. Every rank calls it with the same
    n, once for each batch, and gets at least one sample if n is large enough. A rank
    with an empty part reduces with weight 0. A plain script gets ``range(n)``.

    Raises:
        ConfigError: n is no whole number above 0, or there is no group, or a loader, or
            the parts are unequal before elche wraps a model.
    """
    if process.run is not None:
        text = "elche.share() is for loops without a loader: that of elche.setup"
        raise ConfigError(f"{text} yields this rank's share of each batch already")
    place = _place()
    if process.shares.place != place:  # a group of other ranks
        process.shares = CallShares(*place)
        if (emulation := process.placed().emulation) is not None:
            process.shares.least_s = emulation.pass_s
    sleep_until(process.shares.due_s)
    part = process.shares.split(n, clock_s())
    if process.shares.is_unequal and not process.weighs_gradients:
        raise ConfigError(
            f"elche.share({n}) divides unequally over {place[1]} ranks, and nothing "
            "weights their gradients: wrap the model in elche.Replica or "
            "elche.DistributedDataParallel before (torch's own DistributedDataParallel "
            f"weights ranks equally), or pass a multiple of {place[1]}"
        )
    return part


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    """Excludes the block's time from the current part's, but not the device's work."""
    shares = process.shares
    if shares.place[1] == 1:
        yield
        return
    if device.type != "cpu":  # not other streams: a reduction may wait on one
        record_event(device).synchronize()
    sleep_until(shares.due_s)
    began_s = clock_s()
    yield
    shares.exclude_wait(clock_s() - began_s)


def _place() -> tuple[int, int]:
    """Rank and world size of the group whose ranks share batches."""
    if process.manual is not None:
        return process.manual.group.rank, process.manual.group.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if process.placed().world_size > 1:
        text = "elche.share() needs a group of ranks: call elche.init_group first, or"
        raise ConfigError(f"{text} torch.distributed.init_process_group")
    return 0, 1
