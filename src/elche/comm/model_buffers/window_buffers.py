"""Reduction of changed buffers at the end of a window, in one small message.

Float buffers (BatchNorm statistics) are overwritten by their plain mean over the ranks
that trained, without drift or outer step. Bool buffers take the majority of these
ranks; a tie is True. Counters (``num_batches_tracked``) become the common value plus
the sum of all ranks' increments. Messages are float64, which holds counters up to 2⁵³
and rounds a mean once. If no rank's contribution counts (e.g. all were discarded, and
statistics may be NaN), float buffers return to their values after the last window.

Values are captured at the window's end. Later increments are kept for the next window;
float buffers written meanwhile are overwritten anyway. Buffers that have been sent
before can be sent before it is known which ones changed
(:meth:`WindowBuffers.begin_known`).

A flag after a buffer's values marks that a rank has resized or removed it (e.g. a cache
that grows with the longest sequence). From then on each rank keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elche.comm.model_buffers.buffers import SNAPSHOT_ELEMENTS, BufferWatch
from elche.comm.model_buffers.known_buffers import KnownBuffers
from elche.comm.transport.exchange import succeeded
from elche.comm.transport.process_group import Group, gather_values
from elche.coordination.protocol.instructions import Reduce

WHAT = "averaging buffers"


@dataclass(slots=True)
class _Sent:
    """A message in flight with the concatenated values of some buffers."""

    indices: list[int]
    message: torch.Tensor
    work: Any = None


class WindowBuffers:
    """Averages one model's buffers window by window.

    Args:
        model: model whose current buffers are read at every call.
        group: process group of all ranks.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._known = KnownBuffers(model)
        self._group = group
        self._watch = BufferWatch(model)
        self._common: dict[int, torch.Tensor] = {}
        self._common_floats: dict[int, torch.Tensor] = {}
        self._taken: dict[int, torch.Tensor] | None = None
        self._waiting: set[int] = set()
        self._ever: set[int] = set()
        self._sent_early: list[int] = []
        self._sent: list[_Sent] = []
        self._applied: list[_Sent] = []
        self._plan: Reduce | None = None
        self.rebase()

    def agree(self) -> None:
        """Agrees on the buffers of one form on all ranks; call it before sending.

        Raises:
            CommunicationError: a rank did not arrive in time.
        """
        self._known.agree(self._group)
        self.rebase()

    def connect(self, group: Group) -> None:
        """Switches to another group, whose ranks may know nothing of sent buffers."""
        self._group = group
        self._sent, self._sent_early = [], []
        self._ever.clear()

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the current values as common and marks them as unwritten."""
        self._watch.mark()
        self._waiting.clear()
        self._taken = None
        present = self._known.common()
        self._common = {
            index: _counted(buffer)
            for index, kind, buffer in present
            if not kind.is_averaged
        }
        # Large buffers that never change (e.g. a mask) are not worth a copy.
        self._common_floats = {
            index: _exact(buffer)
            for index, kind, buffer in present
            if kind.is_averaged and buffer.numel() <= SNAPSHOT_ELEMENTS
        }

    def _written(self) -> set[int]:
        return self._known.numbers_of(self._watch.written()) - self._known.own

    def changed(self) -> tuple[int, ...]:
        """Returns indices of buffers written since they were last sent.

        After :meth:`take`, only those written before it.
        """
        if self._taken is None:
            return tuple(sorted(self._waiting.union(self._written())))
        return tuple(sorted(self._waiting))

    def common_counts(self) -> dict[int, torch.Tensor]:
        """Returns counters without this rank's later increments, by buffer ID."""
        present = self._known.common()
        return {id(b): self._common[i] for i, _, b in present if i in self._common}

    @torch.no_grad()
    def take(self) -> None:
        """Copies all buffers that :meth:`begin` may have to send.

        These are counters, changed buffers, and buffers sent before. A buffer that
        only other ranks changed is read at sending, the first time.
        """
        self._waiting.update(self._written())
        self._watch.mark()
        self._taken = {
            index: _exact(buffer) if kind.is_averaged else _counted(buffer)
            for index, kind, buffer in self._known.common()
            if not kind.is_averaged or index in self._waiting | self._ever
        }

    @torch.no_grad()
    def begin_known(self, *, is_active: bool) -> None:
        """Begins the reduction of all buffers sent before; call after :meth:`take`.

        Args:
            is_active: True if this rank has trained in the window.
        """
        self._sent_early = sorted(self._ever - self._known.own)
        self._send(self._sent_early, is_active=is_active)

    @torch.no_grad()
    def begin(self, plan: Reduce) -> None:
        """Begins the rest of the reduction of ``plan.buffers``, after :meth:`take`."""
        self._plan = plan
        early = {*self._sent_early, *self._known.own}
        new = [index for index in plan.buffers if index not in early]
        self._send(new, is_active=plan.weight > 0)
        self._ever.update(plan.buffers)

    def _send(self, indices: list[int], *, is_active: bool) -> None:
        if not indices:
            return
        buffers, sent = self._known.present(), self._message(indices)
        for index, part in self._parts_of(sent):
            buffer = buffers[index]
            values = None if buffer is None else self._part(index, buffer)
            if values is None:
                part[-1] = 1.0
            elif is_active:
                part[:-1] = values
        sent.work = self._group.all_reduce_async(sent.message)
        self._sent.append(sent)

    @property
    def is_summed(self) -> bool:
        """True if all sent messages have been summed."""
        return all(succeeded(sent.work) for sent in self._sent)

    @torch.no_grad()
    def copy_result(
        self, group: Group, source: int, plan: Reduce, *, lacks: bool
    ) -> None:
        """Copies the sums to the ranks that lack them; collective, in a new group.

        Args:
            group: group of the survivors.
            source: place in it of a rank that has applied the sums.
            plan: plan that lists the buffers.
            lacks: True if this rank lacks the sums; it calls :meth:`apply` next.
        """
        indices = list(plan.buffers)
        if lacks:
            self._sent, self._plan = [], plan
        if not indices:
            return
        message = self._message(indices)
        if group.rank == source:
            parts = dict(self._parts_of(message))
            for sent in self._applied:
                for index, part in self._parts_of(sent):
                    if index in parts:
                        parts[index].copy_(part)
            for index in self._known.own.intersection(indices):
                parts[index][-1] = 1.0
        group.broadcast(message.message, WHAT, source)
        if lacks:
            self._sent = [message]

    def join_own(self) -> None:
        """Marks buffers as local that are local on any rank; a collective call."""
        if self._known.kinds:
            ranks = gather_values(self._group, sorted(self._known.own), WHAT)
            self._known.keep_own(number for own in ranks for number in own)

    def poll(self) -> bool:
        """True if :meth:`wait` would return, or raise, at once."""
        return all(sent.work.is_completed() for sent in self._sent)

    def wait(self) -> None:
        """Waits for the sums of all ranks.

        Raises:
            CommunicationError: the reduction failed.
        """
        for sent in self._sent:
            if sent.work is not None:
                self._group.wait(sent.work, WHAT)

    @torch.no_grad()
    def apply(self) -> None:
        """Writes means and sums of the plan's buffers; call after :meth:`wait`.

        If no rank's training counts, float buffers get their last common values again,
        except for large buffers that have never been sent.
        """
        plan = self._plan
        assert self._taken is not None
        assert plan is not None
        late = self._written()
        settled = set()
        for sent in self._sent:
            for index, part in self._parts_of(sent):
                if bool(part[-1]):
                    self._known.keep_own([index])
                elif index in plan.buffers and self._write(
                    index, part[:-1], plan.active_ranks
                ):
                    settled.add(index)
        if plan.active_ranks > 0 and self._group.rank == 0:
            means = {i: m for i, m in self._common_floats.items() if i in settled}
            self._known.name_means(self._taken, means)
        self._waiting -= settled
        self._waiting |= late.difference(settled - self._common.keys())
        self._waiting -= self._known.own
        self._watch.mark()
        self._taken = self._plan = None
        # Drop the work handles, which would keep a group's connections open.
        for sent in self._sent:
            sent.work = None
        self._applied, self._sent, self._sent_early = self._sent, [], []

    def _size(self, index: int) -> int:
        """Number of elements in a message: the buffer's elements and a flag."""
        return self._known.kinds[index].numel + 1

    def _message(self, indices: list[int]) -> _Sent:
        """Makes a message of zeros for these buffers."""
        numel = sum(map(self._size, indices))
        zeros = torch.zeros(numel, dtype=torch.float64, device="cpu")
        return _Sent(indices, zeros)

    def _parts_of(self, sent: _Sent) -> Iterator[tuple[int, torch.Tensor]]:
        parts = sent.message.split([*map(self._size, sent.indices)])
        yield from zip(sent.indices, parts, strict=True)

    def _write(self, index: int, total: torch.Tensor, active_ranks: int) -> bool:
        """Writes a buffer's common value; False if there is none."""
        buffer = self._known.present()[index]
        if buffer is None:  # resized since sending: the next message flags it
            return True
        if index in self._common:
            self._count(index, buffer, total)
            return True
        if active_ranks > 0:
            self._common_floats[index] = total / active_ranks
        mean = self._common_floats.get(index)
        if mean is None:
            return False
        if buffer.is_complex():
            buffer.copy_(torch.view_as_complex(mean.view(*buffer.shape, 2)))
        elif buffer.dtype == torch.bool:
            buffer.copy_((mean >= 0.5).view(buffer.shape))
        else:
            buffer.copy_(mean.view(buffer.shape))
        return True

    def _part(self, index: int, buffer: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a buffer's sum; None for an untaken counter."""
        assert self._taken is not None
        taken = self._taken.get(index)
        if index in self._common:
            if taken is None:
                return None
            return (taken - self._common[index]).to(torch.float64).view(-1)
        return _exact(buffer) if taken is None else taken

    def _count(
        self, index: int, buffer: torch.Tensor, increments: torch.Tensor
    ) -> None:
        """Sets a counter to the common count plus increments since :meth:`take`."""
        assert self._taken is not None
        total = increments.round().to(torch.int64).view(buffer.shape)
        self._common[index] = self._common[index] + total
        since = _counted(buffer) - self._taken[index]
        buffer.copy_(self._common[index] + since)


def _exact(buffer: torch.Tensor) -> torch.Tensor:
    """Flat float64 copy on the CPU, with complex numbers as pairs."""
    values = buffer.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.to("cpu", torch.float64, copy=True).reshape(-1)


def _counted(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().to("cpu", torch.int64, copy=True)
