"""`elche.all_gather`: rows of all ranks in one loss."""

from __future__ import annotations

import torch

from elche.errors import ConfigError
from elche.process import process
from elche.runtime.manual_run import current_manual_run
from elche.runtime.run import Run


def all_gather(tensor: torch.Tensor, weight: float | None = None) -> torch.Tensor:
    """The rows of all ranks' tensors, in the order of ranks, with gradient.

    For losses over all pairs of a batch (contrastive learning)::

        embeddings, labels = elche.all_gather(model(x)), elche.all_gather(y)
        loss = contrastive_loss(embeddings, labels)

    Ranks may bring different numbers of rows; under ``sync`` the result is in the order
    of the global batch, on every rank. elche weighs each rank's loss by its samples (or
    by ``weight_of``), and the gradient follows that: it is the one of the whole batch
    where every rank computes the mean loss over all rows, and as well where each
    computes the mean loss of its own rows against all. A rank whose
    `elche.batch_weight` is 0 adds no rows. Labels and other tensors without gradient
    come as they are, in any dtype.

    Every rank calls it equally often, and runs backward through the result or not. On
    one device it returns the tensor. Outside the loop each rank's loss weighs alike.

    Args:
        tensor: this rank's rows, along the first dimension.
        weight: with `elche.init_group` only: what this rank gives to
            ``weighted_all_reduce_gradients``; None for equal ranks.

    Raises:
        ConfigError: this is no tensor with rows, there is no run, or the ranks train in
            windows, in which they do not meet at every batch.
        MismatchError: ranks bring rows of different shapes or dtypes, or a gradient on
            some only.
        CommunicationError: a rank did not call it in time.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        raise ConfigError(
            f"expected a tensor of rows, got {type(tensor).__name__} without a "
            "dimension; give tensor[None]"
        )
    run, by_hand = process.run, current_manual_run()
    if run is None and by_hand is None:
        raise ConfigError(
            "elche.all_gather() needs a run: call elche.setup or elche.init_group first"
        )
    if weight is not None and (run is not None or not weight > 0.0):
        raise ConfigError(
            "expected weight= to be above 0, and only with elche.init_group (what a "
            f"batch weighs under elche.setup says weight_of=), got {weight!r}"
        )
    if isinstance(run, Run):
        return run.gather_rows(tensor)
    if run is None and by_hand is not None:
        return by_hand.gather_rows(tensor, 1.0 if weight is None else float(weight))
    return tensor
