"""Check that inputs and targets belong to the same samples.

Each reads its own part of the batch. Scripts whose loaders shuffle differently on two
ranks would train on pairs that do not belong together, and no gradient is wrong.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from elche.errors import ConfigError
from elche.pipeline.peers.communicator import PipelineCommunicator
from elche.pipeline.replicas.replica_groups import ReplicaGroups
from elche.pipeline.step.inputs import Seat
from elche.pipeline.trees import as_tensors, map_tensors

COMPARED_STEPS = 2
_LOOKED_AT = 64

logger = logging.getLogger(__name__)


def compare_batches(
    batch: Any, seat: Seat, communicator: PipelineCommunicator, groups: ReplicaGroups
) -> None:
    """Warns when the first and the last stage's rank were given different batches.

    A rank that was given no batch has nothing to compare. Only a warning: augmentation
    may draw differently on two ranks that hold the same samples.

    Args:
        batch: as this rank was given it.
        seat: of this rank.
        communicator: all ranks, which call this together.
        groups: their replicas.
    """
    reads = seat.is_first or seat.is_last
    given = fingerprint(batch) if reads and batch is not None else ""
    told = communicator.exchange(
        [seat.is_first, seat.is_last, given], "comparing the batches"
    )
    mine = [(rank, *told[rank]) for rank in groups.members]
    first, read = next((rank, text) for rank, has, _, text in mine if has)
    last, seen = next((rank, text) for rank, _, has, text in mine if has)
    if communicator.rank == last and read and seen and read != seen:
        logger.warning(
            "rank %d, which reads the batch, was given another batch than rank %d, "
            "which reads the target: input and target may belong to different samples; "
            "seed the sampler alike on all ranks (generator=), or pass each rank only "
            "what it reads",
            first,
            last,
        )


def fingerprint(batch: Any) -> str:
    """Tells batches apart by shapes, types and some elements of each tensor.

    Returns:
        "" for what would be no batch where it is read.
    """
    try:
        batch = as_tensors(batch, "the batch")
    except ConfigError:
        return ""
    found = hashlib.sha256()

    def add(tensor: torch.Tensor) -> None:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // _LOOKED_AT)][:_LOOKED_AT].cpu()
        found.update(f"{list(tensor.shape)} {tensor.dtype} {some.tolist()}".encode())

    map_tensors(batch, add)
    return found.hexdigest()[:16]
