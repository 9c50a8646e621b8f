"""Float buffers (BatchNorm statistics) made equal on all ranks under ``sync``.

A buffer that any rank wrote is overwritten by the plain mean over the ranks that had
samples. Which ones that are must be agreed: a flag per buffer travels with every
message, so a buffer seen to change on any rank goes along from then on, and one that
never changes (a mask) never travels.
"""

from __future__ import annotations

import torch
from torch import nn

from elche.comm.process_group import Group


class BufferAverager:
    """Averages one model's float buffers.

    Args:
        model: the model.
        group: the process group.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self._group = group
        self._travelling: set[int] = set()
        self._marks = self._current_marks()

    @staticmethod
    def for_model(model: nn.Module, group: Group) -> BufferAverager | None:
        """An averager, or None for a model without float buffers."""
        return BufferAverager(model, group) if _float_buffers(model) else None

    @torch.no_grad()
    def average(self, active_ranks: int, *, mine: bool) -> None:
        """Averages what changed, with all ranks.

        Args:
            active_ranks: ranks that had samples.
            mine: whether this rank is one of them; else it sends zeros.
        """
        buffers = _float_buffers(self._model)
        changed = self._changed() if mine else set()
        known = sorted(self._travelling)
        flags = self._reduce(buffers, known, changed, active_ranks, mine)
        new = sorted({i for i, flag in enumerate(flags) if flag} - self._travelling)
        if new:
            self._travelling.update(new)
            self._reduce(buffers, new, changed, active_ranks, mine)
        self._marks = self._current_marks()

    def _reduce(
        self,
        buffers: list[torch.Tensor],
        indices: list[int],
        changed: set[int],
        active_ranks: int,
        mine: bool,
    ) -> list[float]:
        """One message: a flag per buffer, then the mean of ``indices``."""
        double = any(buffer.dtype == torch.float64 for buffer in buffers)
        dtype = torch.float64 if double else torch.float32
        numel = sum(buffers[index].numel() for index in indices)
        message = torch.zeros(len(buffers) + numel, dtype=dtype)
        for index in changed:
            message[index] = 1.0
        at = len(buffers)
        for index in indices:
            size = buffers[index].numel()
            if mine:
                part = buffers[index].detach().reshape(-1).to("cpu", dtype)
                message[at : at + size] = part / active_ranks
            at += size
        self._group.all_reduce(message, "averaging buffers")
        at = len(buffers)
        for index in indices:
            size = buffers[index].numel()
            buffers[index].copy_(message[at : at + size].view(buffers[index].shape))
            at += size
        flags: list[float] = message[: len(buffers)].tolist()
        return flags

    def _changed(self) -> set[int]:
        now = self._current_marks()
        pairs = zip(now, self._marks, strict=True)
        return {index for index, (new, old) in enumerate(pairs) if new != old}

    def _current_marks(self) -> list[tuple[int, int]]:
        buffers = _float_buffers(self._model)
        return [(id(buffer), buffer._version) for buffer in buffers]


def _float_buffers(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]

