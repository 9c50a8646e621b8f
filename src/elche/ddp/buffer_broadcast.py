"""Broadcast of a model's buffers after a backward pass.

torch's DistributedDataParallel broadcasts all buffers of rank 0 before a forward pass,
so that an evaluation on one rank waits for the others. Here they are sent after a
backward pass, where some rank has written one, from the lowest rank that had a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import nn

from elche.comm.model_buffers.buffers import BufferWatch
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.ddp.group import TorchGroup
from elche.errors import MismatchError

ALIGN_BYTES = 16


class BufferBroadcast:
    """Keeps the buffers of one model equal on all ranks.

    Args:
        model: the model; its present buffers are looked up at every call.
        ignored: names of buffers that stay local.
        group: the process group.
    """

    def __init__(
        self, model: nn.Module, ignored: frozenset[str], group: TorchGroup
    ) -> None:
        self._model = model
        self._ignored = ignored
        self._group = group
        self._watch = BufferWatch(model)
        self._exchange: tuple[float, Exchange] | None = None

    def is_written(self) -> bool:
        """True if this rank wrote a buffer since the last broadcast."""
        names = [name for name, _ in self._model.named_buffers()]
        return any(names[at] not in self._ignored for at in self._watch.written())

    def layout(self) -> float:
        """Another number for other names, shapes or dtypes of the buffers."""
        layout = [(name, b.shape, b.dtype) for name, b in self._named()]
        return float(zlib.crc32(repr(layout).encode()))

    @torch.no_grad()
    def send(self, layouts: Sequence[float], source: int) -> None:
        """Copies the buffers of one rank to all, with all ranks.

        Args:
            layouts: of each rank.
            source: the rank.

        Raises:
            MismatchError: ranks have other buffers.
            CommunicationError: it failed, or a rank did not arrive in time.
        """
        group = self._group
        for rank, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise MismatchError(
                    f"the model has other buffers on rank {rank} than on rank 0: one "
                    "was added, removed or resized; do so on every rank, or keep "
                    "buffers local by forward_sync_buffers=False"
                )
        buffers = [buffer for _, buffer in self._named()]
        sizes = [-(-each.nbytes // ALIGN_BYTES) * ALIGN_BYTES for each in buffers]
        if self._exchange is None or self._exchange[0] != layouts[0]:
            where = group.control_device
            opened = open_exchange(group, sum(sizes), torch.uint8, where)
            self._exchange = layouts[0], opened
        exchange = self._exchange[1]
        exchange.reclaim("broadcasting buffers")
        message = exchange.contribution(0)
        message.zero_()
        if group.rank == source:
            for part, buffer in zip(message.split(sizes), buffers, strict=True):
                _typed(part, buffer).copy_(buffer)
        exchange.begin(0)
        total = exchange.finish("broadcasting buffers")
        if group.rank != source:
            for part, buffer in zip(total.split(sizes), buffers, strict=True):
                # Autograd would refuse a change of what the pass under way has saved.
                buffer.data.copy_(_typed(part, buffer))
        self._watch.mark()

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, buffer)
            for name, buffer in self._model.named_buffers()
            if name not in self._ignored
        ]


def _typed(raw: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """A view of bytes with the dtype and shape of a buffer."""
    return raw[: buffer.nbytes].view(buffer.dtype).view(buffer.shape)
