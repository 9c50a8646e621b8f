"""This process among the ranks of the run, and rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from elche.errors import ConfigError
from elche.runtime.process.connect import meet
from elche.runtime.process.environment import read_placement
from elche.runtime.run import Run
from elche.session.process import current_run, process
from elche.session.sharing import waiting


def rank() -> int:
    """This process's rank; 0 in a run of one.

    After ranks have died, its place among the survivors.
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
    """Waits until every rank has called it; returns at once in a run of one.

    Before `elche.setup`, while rank 0 downloads data, its deadline is half an hour.

    Raises:
        RemoteRankError: another rank failed meanwhile.
        NonFiniteError: the run has ended with this error, which a ``break`` cannot
            raise.
        CommunicationError: a rank is lost; `DeadlineError` if one did not call it
            within ``timeout_s``.
        ConfigError: it is called inside a loop under ``cadence``, where ranks run
            different numbers of batches, or the launcher set no MASTER_PORT.
    """
    if world_size() == 1:
        return
    run, by_hand = current_run(), process.manual
    if run is not None:
        run.collectives.barrier("elche.barrier()")
        return
    with waiting(device()):
        if by_hand is not None:
            by_hand.barrier()
        else:
            meet(process.placed())


Tree = TypeVar("Tree")


def all_gather(tensor: torch.Tensor, weight: float | None = None) -> torch.Tensor:
    """The rows of all ranks' tensors, in the order of ranks, with gradient.

    For losses over all pairs of a batch (contrastive learning)::

        embeddings, labels = elche.all_gather(model(x)), elche.all_gather(y)
        loss = contrastive_loss(embeddings, labels)

    Ranks may pass different numbers of rows; under ``sync`` the result is in the order
    of the global batch, on every rank. elche weighs each rank's loss by its samples (or
    by ``weight_of``). So the gradient is that of the whole batch if every rank computes
    the mean loss over all rows, or the mean loss of its own rows against all. A rank
    whose `elche.batch_weight` is 0 adds no rows. Labels and other tensors without
    gradient are passed through, in any dtype.

    Every rank calls it equally often, and every rank or none runs backward through it.
    On one device it returns the tensor. Outside the loop ranks' losses weigh equally.

    Args:
        tensor: this rank's rows, along the first dimension.
        weight: with `elche.init_group` only: this rank's weight in
            ``weighted_all_reduce_gradients``; None for equal ranks.

    Raises:
        ConfigError: ``tensor`` has no rows, there is no run, or the ranks train in
            windows, where their batches differ in number.
        MismatchError: ranks pass rows of different shapes or dtypes, or a gradient on
            some only.
        CommunicationError: a rank did not call it in time.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        raise ConfigError(
            f"expected a tensor of rows, got {type(tensor).__name__} without a "
            "dimension; give tensor[None]"
        )
    if process.run is None and process.manual is None:
        raise _no_run("elche.all_gather")
    if weight is not None and (process.run is not None or not weight > 0.0):
        raise ConfigError(
            "expected weight= to be above 0, and only with elche.init_group "
            f"(elche.setup takes weight_of=), got {weight!r}"
        )
    return _gathered(tensor, "elche.all_gather", weight=weight or 1.0)


def gather(rows: Tree) -> Tree:
    """The rows of all ranks, in the order of ranks, on every rank; without gradient.

    For predictions, losses and metrics that your own loop collects. Ranks may pass
    different numbers of rows, or none. A rank whose `elche.batch_weight` is 0 adds no
    rows: another rank adds them. Every rank calls it equally often: between epochs,
    or inside the loop under ``sync``. On one device the rows are returned unchanged.

    Args:
        rows: a tensor, or tensors in lists, tuples and dictionaries; each this rank's
            rows along its first dimension. A scalar tensor is one row.

    Raises:
        ConfigError: a nested value has another type, there is no run, or it is called
            inside a loop in windows, where ranks run different numbers of batches.
        MismatchError: ranks pass rows of different shapes or dtypes.
        CommunicationError: a rank did not call it in time.
    """
    gathered: Tree = map_rows(rows, lambda each: gather_rows(each, "elche.gather"))
    return gathered


def any(flag: bool | torch.Tensor) -> bool:
    """True if ``flag`` holds on at least one rank; the same answer on every rank.

    To stop by hand together: ``if elche.any(loss_is_bad): break``. Every rank calls it
    equally often: between epochs, or inside the loop under ``sync``, where it costs a
    small synchronisation. Inside a loop in windows it is refused, and not needed: a
    ``break`` on one rank ends the epoch on all.

    Args:
        flag: flag of this rank.

    Raises:
        ConfigError: there is no run, or it is called inside a loop in windows.
        CommunicationError: a rank did not call it in time.
    """
    mine = torch.tensor([bool(flag)], device="cpu")
    return bool(gather_rows(mine, "elche.any", is_of_batch=False).any())


def gather_rows(
    rows: torch.Tensor, call: str, *, is_of_batch: bool = True
) -> torch.Tensor:
    """The rows of all ranks, without gradient.

    Args:
        rows: rows of this rank; a tensor without dimension is one row.
        call: name of the user's call, for messages.
        is_of_batch: omit rows of a batch that counts for another rank.

    Raises:
        ConfigError: there is no run, or it is called inside a loop in windows.
    """
    rows = rows.detach()
    rows = rows if rows.dim() else rows[None]
    return _gathered(rows, call, is_of_batch=is_of_batch)


def _gathered(
    rows: torch.Tensor, call: str, *, is_of_batch: bool = True, weight: float = 1.0
) -> torch.Tensor:
    run, by_hand = process.run, process.manual
    if isinstance(run, Run):
        return run.collectives.gather_rows(rows, call, is_of_batch=is_of_batch)
    if run is None and by_hand is not None:
        with waiting(rows.device):
            return by_hand.gather_rows(rows, float(weight))
    if run is None and read_placement().world_size > 1:
        raise _no_run(call)
    return rows


def map_rows(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Applies a function to a nested value's tensors; entries in sorted order.

    Raises:
        ConfigError: it holds something other than tensors.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        done = {key: map_rows(tree[key], change) for key in sorted(tree, key=str)}
        return {key: done[key] for key in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_rows(item, change) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_rows(item, change) for item in tree)
    raise ConfigError(
        "expected a tensor of rows, or tensors in lists, tuples and dictionaries, got "
        f"{type(tree).__name__}; give torch.tensor(...)"
    )


def _no_run(call: str) -> ConfigError:
    return ConfigError(
        f"{call}() needs a run: call elche.setup or elche.init_group first"
    )
