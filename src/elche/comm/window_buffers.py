"""Buffers at the end of a window: one small message for all that changed.

Float buffers (BatchNorm statistics) are overwritten by their plain mean over the ranks
that trained, never through a drift or an outer step. Counters
(``num_batches_tracked``) become the common value plus the sum of all ranks'
increments. All of it travels in float64, which holds counters up to 2⁵³ and rounds a
mean once.

What is sent is taken at the window's end. Increments that come later stay, and count
in the next window; a float buffer that is written meanwhile is overwritten all the
same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elche.comm.buffers import BufferWatch
from elche.comm.process_group import Group
from elche.coordination.messages import Reduce

WHAT = "averaging buffers"


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
        self._taken: dict[int, torch.Tensor] | None = None
        self._waiting: set[int] = set()
        self._ever: set[int] = set()
        self._indices: list[int] = []
        self._message: torch.Tensor | None = None
        self._work: Any = None
        self.rebase()

    def connect(self, group: Group) -> None:
        """Sends through another group from now on."""
        self._group = group
        self._work = self._message = None

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
            or (_is_float(buffer) and index in self._waiting | self._ever)
        }

    @torch.no_grad()
    def begin(self, plan: Reduce) -> None:
        """Begins the reduction of ``plan.buffers``, after :meth:`take`."""
        assert self._taken is not None
        buffers = list(self._model.buffers())
        self._ever.update(plan.buffers)
        self._indices = [
            index
            for index in plan.buffers
            if index in self._common
            or (plan.active_ranks > 0 and _is_float(buffers[index]))
        ]
        self._message = self._work = None
        if not self._indices:
            return
        if plan.weight > 0:
            parts = [self._part(index, buffers[index], plan) for index in self._indices]
        else:
            parts = [
                torch.zeros(_size(buffers[index]), dtype=torch.float64)
                for index in self._indices
            ]
        self._message = torch.cat(parts)
        self._work = self._group.all_reduce_async(self._message)

    def poll(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Waits for all ranks.

        Raises:
            CommunicationError: it failed.
        """
        if self._work is not None:
            self._group.wait(self._work, WHAT)
            self._work = None

    @torch.no_grad()
    def apply(self) -> None:
        """After :meth:`wait`: writes means and sums."""
        assert self._taken is not None
        late = set(self._watch.written())
        buffers = list(self._model.buffers())
        at = 0
        for index in self._indices:
            assert self._message is not None
            buffer = buffers[index]
            part = self._message[at : at + _size(buffer)]
            at += part.numel()
            if index in self._common:
                self._count(index, buffer, part)
            elif buffer.is_complex():
                pairs = part.view(*buffer.shape, 2)
                buffer.copy_(torch.view_as_complex(pairs))
            else:
                buffer.copy_(part.view(buffer.shape))
        settled = set(self._indices)
        self._waiting -= settled
        self._waiting |= late.difference(settled - self._common.keys())
        self._watch.mark()
        self._taken = self._message = None

    def _part(self, index: int, buffer: torch.Tensor, plan: Reduce) -> torch.Tensor:
        assert self._taken is not None
        taken = self._taken.get(index)
        if index in self._common:
            assert taken is not None
            return (taken - self._common[index]).to(torch.float64).view(-1)
        exact = _exact(buffer) if taken is None else taken
        return exact / plan.active_ranks

    def _count(
        self, index: int, buffer: torch.Tensor, increments: torch.Tensor
    ) -> None:
        """The common count, and on top of it what came after the last :meth:`take`."""
        assert self._taken is not None
        total = increments.round().to(torch.int64).view(buffer.shape)
        self._common[index] = self._common[index] + total
        since = _counted(buffer) - self._taken[index]
        buffer.copy_(self._common[index] + since)


def _is_float(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _is_counter(buffer: torch.Tensor) -> bool:
    return not _is_float(buffer) and buffer.dtype != torch.bool


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
