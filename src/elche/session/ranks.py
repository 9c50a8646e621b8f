"""This process among the ranks of the run."""

from __future__ import annotations

import torch

from elche.by_hand.manual_run import current_manual_run
from elche.errors import ConfigError
from elche.session.process import current_run, process


def rank() -> int:
    """This process's rank; 0 in a run of one.

    Where ranks have died and the others go on, its place among these.
    """
    run = current_run()
    if run is not None:
        return run.rank
    return process.placed().rank if process.place is None else process.place


def world_size() -> int:
    """Number of ranks; 1 in a plain script. Ranks that have died do not count."""
    run = current_run()
    return process.placed().world_size if run is None else run.world_size


def is_main_process() -> bool:
    """True on rank 0, which prints and saves: see `rank`."""
    return rank() == 0


def device() -> torch.device:
    """The device that this rank trains on."""
    return process.placed().device


def barrier() -> None:
    """Waits until every rank has come here; returns at once in a run of one.

    Raises:
        RemoteRankError: another rank failed meanwhile.
        NonFiniteError: the run had ended for that, which a ``break`` could not say.
        CommunicationError: a rank is gone; `DeadlineError` where one did not come
            within ``timeout_s``.
        ConfigError: there is no run yet, or this is the inside of a loop under
            ``cadence``, where ranks run different numbers of batches.
    """
    if world_size() == 1:
        return
    run, by_hand = current_run(), current_manual_run()
    if run is None and by_hand is not None:
        by_hand.barrier()
        return
    if run is None:
        raise ConfigError(
            "elche.barrier() needs a run: call elche.setup or elche.init_group first"
        )
    run.barrier("elche.barrier()")
