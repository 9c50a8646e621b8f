"""Averages of buffers, such as BatchNorm's, over the replicas that trained them.

Each replica updates its own buffers. Before an evaluation, and before the state is
gathered, a changed buffer becomes the plain mean over the replicas that changed it. The
mean of moving averages is the moving average of means, so no step is lost. A counter
gets the value of the first replica that changed it. Unchanged buffers are not sent and
stay identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from elche.comm.tensors.flat import same_values
from elche.comm.transport.process_group import Group
from elche.pipeline.peers.peers import StagePeers


@final
@dataclass
class SharedBuffers:
    """Buffers that the same ranks hold.

    Attributes:
        group: process group of these ranks.
        ranks: ranks that hold the buffers, ascending.
        places: module and name of each buffer; in the same order on all these ranks.
    """

    group: Group
    ranks: tuple[int, ...]
    places: list[tuple[nn.Module, str]]
    _before: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before = [one.clone() for one in self._now()]

    def continue_from(self, former: Sequence[SharedBuffers]) -> None:
        """Adopts from `former` the last values that were equal on all replicas."""
        known = {
            (id(module), name): before
            for one in former
            for (module, name), before in zip(one.places, one._before, strict=True)
        }
        self._before = [known[id(module), name] for module, name in self.places]

    def _now(self) -> list[torch.Tensor]:
        """Current buffers; a module may have replaced one by another tensor."""
        return [module.get_buffer(name).detach() for module, name in self.places]

    def average(self, peers: StagePeers, timeout_s: float) -> None:
        """Makes the buffers equal on all ranks, which must all call it.

        Raises the errors of `StagePeers.wait`.
        """
        me = self.ranks.index(peers.rank)
        buffers = self._now()
        size = len(buffers), len(self.ranks)
        changed = torch.zeros(size, dtype=torch.float64, device="cpu")
        for index, (now, before) in enumerate(zip(buffers, self._before, strict=True)):
            changed[index, me] = not same_values(now, before)
        self._sum(changed, peers, timeout_s)
        moved = [index for index, row in enumerate(changed.tolist()) if any(row)]
        if not moved:
            return
        shares = [_share(buffers[i], changed[i].tolist(), me) for i in moved]
        flat = torch.cat(shares)
        self._sum(flat, peers, timeout_s)
        parts = flat.split([share.numel() for share in shares])
        for index, part in zip(moved, parts, strict=True):
            numbers = _as_numbers(buffers[index])
            numbers.copy_(part.view(numbers.shape))
            self._before[index] = buffers[index].clone()

    def _sum(self, tensor: torch.Tensor, peers: StagePeers, timeout_s: float) -> None:
        work = self.group.all_reduce_async(tensor)
        what = "the average of the buffers"
        peers.wait(work.is_completed, work.wait, self.ranks, what, timeout_s)


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """View of the tensor, with complex numbers as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _share(buffer: torch.Tensor, changed: list[float], me: int) -> torch.Tensor:
    """This rank's term of the sum that becomes the new value."""
    numbers = _as_numbers(buffer)
    given = numbers.reshape(-1).to("cpu", torch.float64)
    is_mean = numbers.is_floating_point()
    gives = changed[me] if is_mean else me == changed.index(1.0)
    if not gives:
        return torch.zeros_like(given)
    return given / sum(changed) if is_mean else given
