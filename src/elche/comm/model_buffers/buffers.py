"""Float buffers (BatchNorm statistics) made equal on all ranks under ``sync``.

A buffer that any rank wrote is overwritten by the plain mean over the ranks that had
samples. Every message has a flag per buffer, so that ranks agree on the written ones: a
buffer written on any rank is sent from then on, and a buffer that never changes (a
mask) is never sent. Statistics of SyncBatchNorm layers are bit-identical already and
are never sent. A second flag marks a buffer that a rank has resized or removed; from
then on each rank keeps its own. Counters also stay local: they are sent in the first
steps only, for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat

import torch
from torch import nn

from elche.comm.model_buffers.known_buffers import KnownBuffers, norm_buffers
from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.process_group import Group, gather_values
from elche.errors import CommunicationError
from elche.torch_internals.held import version

SNAPSHOT_ELEMENTS = 65_536
COUNT_LOOKS = 10
"""Number of first steps that compare counters, which differ once shares are unequal."""
COPYING = "copying buffers of a step that a lost rank left unfinished"


class BufferWatch:
    """Detects which buffers of a model were written since the last mark.

    torch's batch norm writes its running statistics without raising their version, so
    versions are not enough. Buffers of norm layers in training mode count as written,
    and small buffers on the CPU are compared by value.

    Args:
        model: model whose current buffers are read at every call.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.mark()

    def mark(self) -> None:
        """Marks the current values as unwritten."""
        self._marks = [
            (id(b), version(b), b.detach().clone() if _is_comparable(b) else None)
            for b in self._model.buffers()
        ]

    def written(self) -> list[int]:
        """Returns indices in ``model.buffers()`` of buffers written since the mark."""
        norms = norm_buffers(self._model, is_training=True)
        marks = chain(self._marks, repeat((0, 0, None)))  # later ones are new
        return [
            index
            for index, (buffer, (known, seen, value)) in enumerate(
                zip(self._model.buffers(), marks, strict=False)
            )
            if (id(buffer), version(buffer)) != (known, seen)
            or id(buffer) in norms
            or (value is not None and not _same_bits(buffer, value))
        ]


class BufferAverager:
    """Averages one model's float buffers at every step."""

    def __init__(self, model: nn.Module, known: KnownBuffers, group: Group) -> None:
        self._model = model
        self._group = group
        self._watch = BufferWatch(model)
        self._known = known
        self._travelling: set[int] = set()
        self._looks = COUNT_LOOKS
        self._last: dict[int, torch.Tensor] = {}  # means by index, unmodified
        self._exchange: Exchange | None = None
        self._side = 0

    @staticmethod
    def for_model(model: nn.Module, group: Group) -> BufferAverager | None:
        """Makes an averager, or None without common float buffers; collective."""
        known = KnownBuffers(model)
        known.agree(group)
        equal = _synchronised(model)
        has_any = any(
            kind.dtype.is_floating_point and id(buffer) not in equal
            for _, kind, buffer in known.common()
        )
        return BufferAverager(model, known, group) if has_any else None

    @torch.no_grad()
    def average(self, active_ranks: int, *, mine: bool) -> None:
        """Averages written buffers; a collective call.

        Args:
            active_ranks: number of ranks that had samples.
            mine: True if this rank had samples; else it sends zeros.
        """
        self._last = {}
        if active_ranks == 0 or self._group.world_size == 1:
            return  # all samples were on ranks that have died, or there is one rank
        buffers = self._known.present()
        equal = _synchronised(self._model)
        norms, self._looks = norm_buffers(self._model), max(0, self._looks - 1)
        sent = {
            index
            for index, buffer in enumerate(buffers)
            if buffer is not None
            and (
                buffer.is_floating_point() or (self._looks and id(buffer) not in norms)
            )
            and not buffer.is_complex()
            and id(buffer) not in equal
        }
        written = self._known.numbers_of(self._watch.written()) if mine else set()
        written &= sent - self._known.own
        divisor = active_ranks if mine else 0
        agreed = set(self._travelling)
        try:
            flags = self._reduce(buffers, sorted(agreed), written, divisor)
            new = sorted(flags - self._travelling - self._known.own)
            if new:
                self._travelling.update(filter(self._is_float, new))
                self._reduce(buffers, new, written, divisor)
                if self._group.rank == 0:
                    present = ((index, buffers[index]) for index in new)
                    own = {i: b.reshape(-1).cpu() for i, b in present if b is not None}
                    self._known.name_means(own, self._last)
            self._write(buffers, self._last)  # all or none: a reduction may be repeated
        except CommunicationError:
            self._travelling = agreed  # other ranks may lack these
            raise
        self._watch.mark()

    @torch.no_grad()
    def continue_in(self, group: Group, source: int | None, *, lacks: bool) -> None:
        """Continues in the group of the survivors; a collective call.

        Args:
            group: group of the survivors.
            source: place of a rank with the last average; None: all have it.
            lacks: True if this rank lacks that average.
        """
        if source is not None:
            self._copy_result(group, source, lacks=lacks)
        self._group, self._exchange = group, None

    def _copy_result(self, group: Group, source: int, *, lacks: bool) -> None:
        """Copies the last average to ranks that lack it; a collective call."""
        held = sorted(self._last), sorted(self._known.own)
        came, own = gather_values(group, held, COPYING)[source]
        sizes = [self._known.kinds[index].numel for index in came]
        means = torch.zeros(sum(sizes), dtype=self._dtype, device="cpu")
        parts = means.split(sizes)
        if group.rank == source:
            for index, part in zip(came, parts, strict=True):
                part.copy_(self._last[index])
        if came:
            group.broadcast(means, COPYING, source)
        if lacks:
            self._known.keep_own(own)
            self._travelling.update(filter(self._is_float, came))
            self._travelling -= self._known.own
            self._last = dict(zip(came, parts, strict=True))
            self._write(self._known.present(), came)
            self._watch.mark()

    def _is_float(self, index: int) -> bool:
        return self._known.kinds[index].dtype.is_floating_point

    @property
    def _dtype(self) -> torch.dtype:
        double = any(kind.dtype == torch.float64 for kind in self._known.kinds)
        return torch.float64 if double else torch.float32

    def _write(
        self, buffers: Sequence[torch.Tensor | None], indices: Iterable[int]
    ) -> None:
        """Writes the last means to float buffers; counters stay this rank's own."""
        for index in filter(self._is_float, indices):
            buffer = buffers[index]
            assert buffer is not None
            buffer.copy_(self._last[index].view(buffer.shape))

    def _exchange_of(self, numel: int) -> Exchange:
        """Returns the exchange for a message size; a collective call for a new size.

        It has two sides: the last means stay readable while the next are received.
        """
        self._side = 1 - self._side
        exchange = self._exchange
        if exchange is None or exchange.contribution(0).numel() != numel:
            exchange = self._exchange = open_exchange(
                self._group, numel, self._dtype, torch.device("cpu"), sides=2
            )
        return exchange

    def _reduce(
        self,
        buffers: list[torch.Tensor | None],
        indices: list[int],
        written: set[int],
        divisor: int,
    ) -> set[int]:
        """Reduces one message: two flags per buffer, then the means of ``indices``.

        Returns:
            Indices of buffers that any rank has written.
        """
        kinds, count = self._known.kinds, len(buffers)
        numel = sum(kinds[index].numel for index in indices)
        exchange = self._exchange_of(2 * count + numel)
        message = exchange.contribution(self._side).zero_()
        for index, buffer in enumerate(buffers):
            message[index] = float(index in written)
            message[count + index] = float(buffer is None)
        parts = message[2 * count :].split([kinds[index].numel for index in indices])
        for index, part in zip(indices, parts, strict=True):
            buffer = buffers[index]
            if divisor and buffer is not None:
                part.copy_(buffer.detach().reshape(-1)).div_(divisor)
        exchange.begin(self._side)
        message = exchange.finish("averaging buffers")
        parts = message[2 * count :].split([kinds[index].numel for index in indices])
        self._known.keep_own(message[count : 2 * count].nonzero().view(-1).tolist())
        self._travelling -= self._known.own
        means = dict(zip(indices, parts, strict=True))
        self._last |= {i: mean for i, mean in means.items() if i not in self._known.own}
        return set(message[:count].nonzero().view(-1).tolist())


def _synchronised(model: nn.Module) -> set[int]:
    """IDs of the buffers that every rank computes identically."""
    return {
        id(buffer)
        for layer in sync_batchnorm_layers(model).values()
        if layer.spans_ranks
        for buffer in layer.buffers()
    }


def _is_comparable(buffer: torch.Tensor) -> bool:
    return buffer.device.type == "cpu" and buffer.numel() <= SNAPSHOT_ELEMENTS


def _same_bits(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """True if values are equal; NaN equals NaN, since a mask may hold NaN."""
    is_alike = (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
    return is_alike and torch.allclose(buffer, value, 0.0, 0.0, equal_nan=True)
