"""Buffers at the end of a window: one small message for all that changed.

Float buffers (BatchNorm statistics) are overwritten by their plain mean over the ranks
that trained, never through a drift or an outer step; flags become what most of these
have, and are raised in a tie. Counters (``num_batches_tracked``) become the common
value plus the sum of all ranks' increments. All of it travels in float64, which holds
counters up to 2⁵³ and rounds a mean once. After a window in which no rank's
contribution counts (all were rejected, say: then their statistics may be no numbers)
float buffers become again what they were after the last one.

What is sent is taken at the window's end. Increments that come later stay, and count
in the next window; a float buffer that is written meanwhile is overwritten all the
same. Buffers that have travelled before can be sent before it is known which changed
this time (:meth:`WindowBuffers.begin_known`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elche.comm.buffers import SNAPSHOT_ELEMENTS, BufferWatch
from elche.comm.process_group import Group
from elche.coordination.messages import Reduce

WHAT = "averaging buffers"


@dataclass(frozen=True, slots=True)
class _Sent:
    """Some buffers' values on their way: in one message, one after another."""

    indices: list[int]
    message: torch.Tensor
    work: Any


class WindowBuffers:
    """Averages one model's buffers, a window at a time.

    Args:
        model: the model; its present buffers are looked up at every call.
        group: the process group.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self._group = group
        self._watch = BufferWatch(model)
        self._common: dict[int, torch.Tensor] = {}
        self._common_floats: dict[int, torch.Tensor] = {}
        self._taken: dict[int, torch.Tensor] | None = None
        self._waiting: set[int] = set()
        self._ever: set[int] = set()
        self._known: list[int] = []
        self._sent: list[_Sent] = []
        self._plan: Reduce | None = None
        self.rebase()

    def connect(self, group: Group) -> None:
        """Sends through another group from now on, whose ranks may know nothing."""
        self._group = group
        self._sent, self._known = [], []
        self._ever.clear()

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the present values as common, and as unwritten."""
        self._watch.mark()
        self._waiting.clear()
        self._taken = None
        self._common = {
            index: _counted(buffer)
            for index, buffer in enumerate(self._model.buffers())
            if _is_counter(buffer)
        }
        # A large one that never changes (a mask) is not worth a copy.
        self._common_floats = {
            index: _exact(buffer)
            for index, buffer in enumerate(self._model.buffers())
            if _is_averaged(buffer) and buffer.numel() <= SNAPSHOT_ELEMENTS
        }

    def changed(self) -> tuple[int, ...]:
        """Indices of buffers written since they last travelled.

        After :meth:`take` those written until then.
        """
        if self._taken is None:
            return tuple(sorted(self._waiting.union(self._watch.written())))
        return tuple(sorted(self._waiting))

    def average(self, plan: Reduce) -> None:
        """Averages what changed, with all ranks, and waits for it.

        Raises:
            CommunicationError: it failed; nothing has changed on this rank.
        """
        self.take()
        self.begin(plan)
        self.wait()
        self.apply()

    @torch.no_grad()
    def take(self) -> None:
        """Copies what :meth:`begin` may have to send.

        These are counters, buffers that changed, and those that ever travelled. A
        large buffer that only other ranks changed is read later, the first time.
        """
        self._waiting.update(self._watch.written())
        self._watch.mark()
        self._taken = {
            index: _counted(buffer) if _is_counter(buffer) else _exact(buffer)
            for index, buffer in enumerate(self._model.buffers())
            if _is_counter(buffer)
            or (_is_averaged(buffer) and index in self._waiting | self._ever)
        }

    @torch.no_grad()
    def begin_known(self, *, is_active: bool) -> None:
        """Begins the reduction of all that ever travelled, after :meth:`take`.

        Args:
            is_active: this rank has trained in the window.
        """
        self._known = sorted(self._ever)
        self._send(self._known, is_active=is_active)

    @torch.no_grad()
    def begin(self, plan: Reduce) -> None:
        """Begins the rest of the reduction of ``plan.buffers``, after :meth:`take`."""
        self._plan = plan
        new = [index for index in plan.buffers if index not in self._known]
        self._send(new, is_active=plan.weight > 0)
        self._ever.update(plan.buffers)

    def _send(self, indices: list[int], *, is_active: bool) -> None:
        buffers = list(self._model.buffers())
        sent = [i for i in indices if i in self._common or _is_averaged(buffers[i])]
        if not sent:
            return
        if is_active:
            parts = [self._part(index, buffers[index]) for index in sent]
        else:
            parts = [
                torch.zeros(_size(buffers[index]), dtype=torch.float64)
                for index in sent
            ]
        message = torch.cat(parts)
        work = self._group.all_reduce_async(message)
        self._sent.append(_Sent(sent, message, work))

    def poll(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return all(sent.work.is_completed() for sent in self._sent)

    def wait(self) -> None:
        """Waits for all ranks.

        Raises:
            CommunicationError: it failed.
        """
        for sent in self._sent:
            self._group.wait(sent.work, WHAT)

    @torch.no_grad()
    def apply(self) -> None:
        """After :meth:`wait`: writes means and sums of what the plan names.

        Where no rank has trained usably, the last common floats are written again. Only
        a large buffer that has never travelled stays as it is then.
        """
        plan = self._plan
        assert self._taken is not None
        assert plan is not None
        late = set(self._watch.written())
        settled = set()
        for sent in self._sent:
            for index, part in self._parts_of(sent):
                if index not in plan.buffers:
                    continue
                if self._write(index, part, plan.active_ranks):
                    settled.add(index)
        self._waiting -= settled
        self._waiting |= late.difference(settled - self._common.keys())
        self._watch.mark()
        self._taken = self._plan = None
        self._sent, self._known = [], []

    def _parts_of(self, sent: _Sent) -> Iterator[tuple[int, torch.Tensor]]:
        buffers, at = list(self._model.buffers()), 0
        for index in sent.indices:
            size = _size(buffers[index])
            yield index, sent.message[at : at + size]
            at += size

    def _write(self, index: int, total: torch.Tensor, active_ranks: int) -> bool:
        """Writes what all ranks hold now; False where nobody knows that."""
        buffer = list(self._model.buffers())[index]
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

    def _part(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        assert self._taken is not None
        taken = self._taken.get(index)
        if index in self._common:
            assert taken is not None
            return (taken - self._common[index]).to(torch.float64).view(-1)
        return _exact(buffer) if taken is None else taken

    def _count(
        self, index: int, buffer: torch.Tensor, increments: torch.Tensor
    ) -> None:
        """The common count, and on top of it what came after the last :meth:`take`."""
        assert self._taken is not None
        total = increments.round().to(torch.int64).view(buffer.shape)
        self._common[index] = self._common[index] + total
        since = _counted(buffer) - self._taken[index]
        buffer.copy_(self._common[index] + since)


def _is_averaged(buffer: torch.Tensor) -> bool:
    is_flag = buffer.dtype == torch.bool
    return is_flag or buffer.is_floating_point() or buffer.is_complex()


def _is_counter(buffer: torch.Tensor) -> bool:
    return not _is_averaged(buffer)


def _size(buffer: torch.Tensor) -> int:
    """Elements of a buffer in the message."""
    return buffer.numel() * (2 if buffer.is_complex() else 1)


def _exact(buffer: torch.Tensor) -> torch.Tensor:
    """A flat copy in float64, complex numbers as pairs."""
    values = buffer.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.to("cpu", torch.float64, copy=True).reshape(-1)


def _counted(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().to("cpu", torch.int64, copy=True)
