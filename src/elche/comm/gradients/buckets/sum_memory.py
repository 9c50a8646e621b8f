"""Memory of reduced gradients: lent to ``p.grad``, taken back when nobody holds it.

As with the gradients that autograd allocates, whoever keeps one keeps its memory, and
where a loop drops them in every step one piece serves all steps. It lies outside of
malloc's heap, in which pieces of this size leave holes when buckets are made anew.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import final

import torch


@final
class SumMemory:
    """Pieces of private memory for the sums of one bucket.

    Args:
        numel: elements of a sum.
        dtype: of the sum.
        device: of the sum; torch's own allocator lends what is not the host's.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._lent: list[tuple[mmap.mmap, weakref.ref[memoryview]]] = []

    def lend(self) -> torch.Tensor:
        """Memory that no tensor uses any more, or new one; its contents are arbitrary.

        A tensor's storage holds the memoryview that it was made from, and every view
        of the tensor its storage.
        """
        if self._device.type != "cpu":
            return torch.empty(self._numel, dtype=self._dtype, device=self._device)
        free = [memory for memory, loan in self._lent if loan() is None]
        self._lent = [(memory, loan) for memory, loan in self._lent if loan()]
        size_bytes = self._numel * self._dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = free[0] if free else mmap.mmap(-1, size_bytes, flags=flags)
        lent = memoryview(memory)
        self._lent.append((memory, weakref.ref(lent)))
        return torch.frombuffer(lent, dtype=self._dtype, count=self._numel)


def give_back_freed() -> None:
    """Has malloc return what is free inside its heap, where it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
