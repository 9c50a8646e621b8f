"""What ranks do so that all hold the same, in their own processes."""

from __future__ import annotations

import torch

from elche.comm.tensors.equal_tensors import make_equal
from tests.comm.averaging.cases.overlap_cases import joined
from tests.harness.rank_main import this_place


def made_equal(changed_rank: int | None) -> tuple[int, list[torch.Tensor]]:
    """Two tensors; on one rank a bit of the second is another one.

    Returns:
        Bytes that travelled, and the tensors afterwards.
    """
    named = [
        ("weight", torch.arange(1000.0).reshape(20, 50).t()),
        ("scale", torch.full((), 0.5, requires_grad=True)),
    ]
    if this_place().rank == changed_rank:
        with torch.no_grad():
            named[1][1].view(torch.int32).bitwise_xor_(1)
    with joined("gloo") as group:
        sent_bytes = make_equal(group, named, "a test")
    return sent_bytes, [tensor.detach() for _, tensor in named]
