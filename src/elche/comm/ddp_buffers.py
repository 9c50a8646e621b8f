"""Buffers that one rank wrote, copied to all others bit for bit.

torch's DistributedDataParallel broadcasts all buffers of rank 0 before every forward.
Here they travel after a backward, when they have changed, so that an evaluation on one
rank waits for nobody, and only those that some rank has written, so that a mask never
travels. The rank whose values count is the lowest one that had a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elche.comm.buckets import size_bytes
from elche.comm.buffers import BufferWatch
from elche.comm.ddp_agreement import kept
from elche.comm.ddp_group import control_device
from elche.comm.exchange import Exchange, open_exchange
from elche.comm.process_group import Group
from elche.errors import ConfigError

ALIGN_BYTES = 16


class BufferSpreader:
    """Keeps the buffers of one model equal on all ranks.

    Args:
        model: the model; its present buffers are looked up at every call.
        ignored: names of buffers that stay local.
        group: the process group.

    Attributes:
        count: buffers of the model.
    """

    def __init__(self, model: nn.Module, ignored: frozenset[str], group: Group) -> None:
        self._model = model
        self._group = group
        named = list(model.named_buffers())
        shared = {name for name, _ in kept(named, ignored)}
        self._shared = {at for at, (name, _) in enumerate(named) if name in shared}
        self._shapes = [buffer.shape for _, buffer in named]
        self._watch = BufferWatch(model)
        self._travelling: list[int] = []
        self._exchange: Exchange | None = None
        self._views: list[list[torch.Tensor]] = []
        self.count = len(named)

    def written(self) -> list[int]:
        """Indices of shared buffers that this rank wrote since they were spread."""
        return sorted(self._shared.intersection(self._watch.written()))

    @torch.no_grad()
    def spread(self, written: Sequence[int], source: int, side: int) -> None:
        """Copies ``source``'s values to all ranks.

        Args:
            written: buffers that any rank has written; the same on all ranks.
            source: the rank whose values count.
            side: which of the two message buffers has its turn.

        Raises:
            CommunicationError: it failed, or not everybody came in time.
            ConfigError: a buffer has another shape than at the start.
        """
        if not written:
            return
        buffers = list(self._model.buffers())
        shapes = [buffer.shape for buffer in buffers]
        if shapes != self._shapes:
            raise ConfigError(
                "buffers of the model were added, removed or resized after it was "
                "wrapped; call set_group() on every rank when that has been done"
            )
        if not set(written) <= set(self._travelling):
            self._travelling = sorted({*self._travelling, *written})
            self._open([buffers[at] for at in self._travelling])
        assert self._exchange is not None
        mine = [buffers[at] for at in self._travelling]
        message = self._exchange.contribution(side)
        if self._group.rank == source:
            torch._foreach_copy_(self._views[side], mine)
        else:
            message.zero_()
        self._exchange.begin(side)
        total = self._exchange.finish("spreading buffers")
        if self._group.rank != source:
            torch._foreach_copy_(mine, _typed(total, mine))
        self._watch.mark()

    def _open(self, buffers: Sequence[torch.Tensor]) -> None:
        numel = sum(_aligned(size_bytes(buffer)) for buffer in buffers)
        where = control_device(self._group)
        self._exchange = open_exchange(self._group, numel, torch.uint8, where, sides=2)
        self._views = [
            _typed(self._exchange.contribution(side), buffers) for side in range(2)
        ]


def _typed(raw: torch.Tensor, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of bytes, one per buffer, of its dtype and shape."""
    at, views = 0, []
    for buffer in buffers:
        part = raw[at : at + size_bytes(buffer)]
        views.append(part.view(buffer.dtype).view(buffer.shape))
        at += _aligned(size_bytes(buffer))
    return views


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
