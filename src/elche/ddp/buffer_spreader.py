"""Buffers written by one rank, broadcast to all others bit for bit.

torch's DistributedDataParallel broadcasts all buffers of rank 0 before every forward.
Here they travel after a backward, when they have changed, so that an evaluation on one
rank waits for no other, and only those that some rank has written, so that a mask never
travels. The rank whose values count is the lowest one that had a batch.

A buffer that is added, removed or resized on any rank after the start (a cache that
grows with the longest sequence seen) is each rank's own from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import size_bytes
from elche.comm.model_buffers.buffers import BufferWatch
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.process_group import Group
from elche.ddp.group import control_device
from elche.ddp.model_comparison import kept
from elche.torch_internals.held import foreach_copy_

ALIGN_BYTES = 16

_log = logging.getLogger(__name__)


class BufferSpreader:
    """Keeps the buffers of one model equal on all ranks.

    Args:
        model: the model; its present buffers are looked up at every call.
        ignored: names of buffers that stay local.
        group: the process group.

    Attributes:
        count: buffers that the model has at the start and that are not ignored.
    """

    def __init__(self, model: nn.Module, ignored: frozenset[str], group: Group) -> None:
        self._model = model
        self._group = group
        shared = kept(model.named_buffers(), ignored)
        self._names = [name for name, _ in shared]
        self._kinds = [_kind(buffer) for _, buffer in shared]
        self._own: set[int] = set()
        self._left_out: set[int] = set()
        self._watch = BufferWatch(model)
        self._travelling: list[int] = []
        self._exchange: Exchange | None = None
        self._views: list[list[torch.Tensor]] = []
        self.count = len(shared)

    def written(self) -> list[int]:
        """Indices of buffers that this rank wrote since they were spread."""
        names = [name for name, _ in self._model.named_buffers()]
        written = {names[at] for at in self._watch.written()}
        return [
            at
            for at, name in enumerate(self._names)
            if name in written and at not in self._own
        ]

    def changed(self) -> list[int]:
        """Indices of buffers that are not what they were at the start: each rank's own.

        Once one was among them, it stays.
        """
        present = dict(self._model.named_buffers())
        for at, (name, kind) in enumerate(zip(self._names, self._kinds, strict=True)):
            if name not in present or _kind(present[name]) != kind:
                self._own.add(at)
        return sorted(self._own)

    @torch.no_grad()
    def spread(
        self, written: Sequence[int], own: Sequence[int], source: int, side: int
    ) -> None:
        """Copies ``source``'s values to all ranks.

        Args:
            written: buffers that any rank has written; the same on all ranks.
            own: buffers that any rank has added, removed or resized; likewise.
            source: the rank whose values count.
            side: which of the two message buffers has its turn.

        Raises:
            CommunicationError: it failed, or a rank did not arrive in time.
        """
        self._leave_out(own)
        spread = set(written) - self._own
        if not spread:
            return
        present = dict(self._model.named_buffers())
        if self._exchange is None or not spread <= set(self._travelling):
            self._travelling = sorted({*self._travelling, *spread})
            self._open([present[self._names[at]] for at in self._travelling])
            assert self._exchange is not None
        mine = [present[self._names[at]] for at in self._travelling]
        message = self._exchange.contribution(side)
        if self._group.rank == source:
            foreach_copy_(self._views[side], mine)
        else:
            message.zero_()
        self._exchange.begin(side)
        total = self._exchange.finish("spreading buffers")
        if self._group.rank != source:
            foreach_copy_(mine, _typed(total, mine))
        self._watch.mark()

    def _leave_out(self, own: Sequence[int]) -> None:
        """These are each rank's own from now on."""
        new = sorted(set(own) - self._left_out)
        if not new:
            return
        _log.info(
            "buffers %s were added, removed or resized: each rank keeps its own",
            ", ".join(self._names[at] for at in new),
        )
        self._own.update(new)
        self._left_out.update(new)
        self._travelling = [at for at in self._travelling if at not in self._own]
        self._exchange = None  # made anew, with all ranks, when one is written

    def _open(self, buffers: Sequence[torch.Tensor]) -> None:
        numel = sum(_aligned(size_bytes(buffer)) for buffer in buffers)
        where = control_device(self._group)
        self._exchange = open_exchange(self._group, numel, torch.uint8, where, sides=2)
        self._views = [
            _typed(self._exchange.contribution(side), buffers) for side in range(2)
        ]


def _kind(buffer: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return buffer.shape, buffer.dtype


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
