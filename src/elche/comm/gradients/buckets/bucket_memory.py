"""Layout of a bucket's message, and memory of its sums, lent to ``p.grad``.

As with the gradients that autograd allocates, whoever keeps one keeps its memory, and
where a loop drops them in every step one piece serves all steps. It lies outside of
malloc's heap, in which pieces of this size leave holes when buckets are made anew.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
import zlib
from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from elche.comm.transport.process_group import Group


@final
class BucketLayout:
    """Gradients one after the other, and a flag of each.

    Args:
        parameters: of one dtype, in the order of their gradients.
        keeps_strides: a gradient lies in the message as its parameter in memory; False:
            as its shape says.

    Attributes:
        dtype: of the message: a complex number travels as two real ones.
        numel: of the message.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, keeps_strides: bool
    ) -> None:
        dtype = parameters[0].dtype
        self._parameters = parameters
        self._keeps_strides = keeps_strides
        numbers = 2 if dtype.is_complex else 1
        self._sizes = [*(numbers * p.numel() for p in parameters), len(parameters)]
        self._shapes = [parameter.shape for parameter in parameters]
        self._is_plain = not dtype.is_complex and all(
            parameter.is_contiguous() for parameter in parameters
        )
        self.dtype = dtype.to_real() if dtype.is_complex else dtype
        self.numel = sum(self._sizes)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A view per parameter, shaped like it, and the flags."""
        *parts, flags = flat.split(self._sizes)
        if self._is_plain:  # quick: lent memory is laid out in every pass
            return [*map(torch.Tensor.view, parts, self._shapes), flags]
        return [*self._shaped(parts), flags]

    def parts(self, residual: torch.Tensor) -> Sequence[torch.Tensor]:
        """A flat view per parameter of a residual, which lies as the gradients do."""
        return torch.split(residual, self._sizes[:-1])

    def shaped_parts(self, residual: torch.Tensor) -> list[torch.Tensor]:
        """The same, shaped like the parameters."""
        return self._shaped(self.parts(residual))

    def _shaped(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        strided = self._keeps_strides
        pairs = zip(parts, self._parameters, strict=True)
        return [_shaped_like(part, p, strided=strided) for part, p in pairs]


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


def formats_agree(parameters: Sequence[nn.Parameter], group: Group) -> bool:
    """True if all ranks hold every parameter in the same memory format."""
    strided = [
        (index, parameter.stride())
        for index, parameter in enumerate(parameters)
        if not parameter.is_contiguous()
    ]
    formats = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    if strided:
        formats[group.rank] = zlib.crc32(repr(strided).encode())
    group.all_reduce(formats, "comparing memory formats")
    return len(set(formats.tolist())) == 1


def _shaped_like(
    flat: torch.Tensor, parameter: torch.Tensor, *, strided: bool
) -> torch.Tensor:
    """A view of ``flat`` with the parameter's shape, and its strides if dense."""
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    if not strided or parameter.is_contiguous() or not _is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if a permutation of dimensions makes the tensor contiguous."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
