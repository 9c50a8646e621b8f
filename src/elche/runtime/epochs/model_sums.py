"""Checksums of a rank's parameters, on their device, for comparison between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import nn

from elche.coordination.accounts.model_checks import (
    Chunk,
    ModelCheck,
    plan_slices,
    slice_at,
)
from elche.coordination.protocol.messages import CheckRows
from elche.runtime.report.scalars import Readback, begin_readback

SHOWN_NAMES = 3
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B1
_odd_numbers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


@final
class ModelSums:
    """Sums over slices of tensors, as they are laid out now.

    Args:
        named: names and tensors, in one order on all ranks.
        kind: of this rank's device.
    """

    def __init__(
        self, named: Iterable[tuple[str, torch.Tensor]], kind: str = ""
    ) -> None:
        self._slices: list[tuple[ModelCheck, list[torch.Tensor], list[Chunk]]] = []
        self._begun: list[tuple[ModelCheck, Readback, Readback]] = []
        alike: dict[object, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in named:
            alike.setdefault((tensor.dtype, tensor.device), []).append((name, tensor))
        for group in alike.values():
            names, tensors = (list(each) for each in zip(*group, strict=True))
            shapes = [
                (t.shape[0], t[:1].numel()) if t.dim() else (1, 1) for t in tensors
            ]
            for chunks in plan_slices(shapes):
                held = [names[at] for chunk in chunks for at, _, _ in chunk]
                values = sum((b - a) * shapes[at][1] for c in chunks for at, a, b in c)
                what, eps = _shown([*dict.fromkeys(held)]), _precision(tensors[0].dtype)
                check = ModelCheck(0, what, kind, 0, values, eps, 0.0, 0.0)
                self._slices.append((check, tensors, chunks))

    def step_ran(self, steps: int) -> None:
        """So many steps of an epoch's part have run: sums a slice every few of them."""
        turn = slice_at(steps)
        if turn is not None:
            self.begin(steps, turn)

    @torch.no_grad()
    def begin(
        self, at: int, turn: int, common: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Begins to sum a slice; does not wait for the device.

        Args:
            at: the step or window.
            turn: number of the slice, modulo how many there are.
            common: tensors that stand for others, by the ids of these.
        """
        if not self._slices:
            return
        check, tensors, chunks = self._slices[turn % len(self._slices)]
        if common:
            tensors = [common.get(id(tensor), tensor) for tensor in tensors]
        bits, sums = _summed(tensors, chunks)
        begun = check._replace(at=at), begin_readback(bits), begin_readback(sums)
        self._begun.append(begun)

    def take(self, until: int) -> CheckRows:
        """Checks that were begun at this step or window, or before; waits for them."""
        begun = [each for each in self._begun if each[0].at <= until]
        self._begun = self._begun[len(begun) :]
        rows = []
        for check, bits, sums in begun:
            total, squares = sums.values()
            number = int(bits.values()[0])
            rows.append(check._replace(bits=number, total=total, squares=squares))
        return tuple(rows)

    def void(self) -> None:
        """The group has changed: what was begun is not reported."""
        self._begun.clear()

    def whole(self) -> CheckRows:
        """Checks of all slices; waits for the device."""
        for turn in range(len(self._slices)):
            self.begin(turn, turn)
        return self.take(len(self._slices))


def checksum(model: nn.Module) -> str:
    """Of the bits of all parameters."""
    rows = ModelSums(model.named_parameters()).whole()
    return "-".join(f"{row[3]:x}" for row in rows)


def kind_of(device: torch.device) -> str:
    """Devices of one kind round alike.

    On CPUs the sum over a large tensor, such as the norm by which gradients are
    clipped, also depends on the number of threads.
    """
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return device.type
    capability = torch.backends.cpu.get_cpu_capability()
    return f"CPU {capability}, {torch.get_num_threads()} threads"


def _summed(
    tensors: Sequence[torch.Tensor], chunks: Sequence[Chunk]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits' sum, and those of values and squares, on the tensors' device."""
    found: tuple[torch.Tensor, torch.Tensor] | None = None
    for chunk in chunks:
        flat = torch.cat([_rows(tensors[at].detach(), a, b) for at, a, b in chunk])
        has_doubles = flat.device.type in ("cpu", "cuda")
        bits = flat.view(_BITS[flat.element_size()])
        total = (bits * _odd(bits)).sum(dtype=torch.int64).view(1)
        wide = flat.to(torch.float64 if has_doubles else torch.float32)
        sums = torch.stack([wide.sum(), torch.dot(wide, wide)])
        if found is not None:
            total, sums = total.add_(found[0], alpha=_FACTOR), sums.add_(found[1])
        found = total, sums
    assert found is not None
    return found


def _shape(tensor: torch.Tensor) -> tuple[int, int]:
    return (tensor.shape[0], tensor[:1].numel()) if tensor.dim() else (1, 1)


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    rows = tensor[start:stop] if tensor.dim() else tensor
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    return rows.reshape(-1)


def _odd(bits: torch.Tensor) -> torch.Tensor:
    """As many odd numbers, by which another order of values is another sum."""
    key = bits.dtype, bits.device
    known = _odd_numbers.get(key)
    if known is None or known.numel() < bits.numel():
        numbers = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device)
        known = _odd_numbers[key] = (numbers * _FACTOR >> 8 | 1).to(bits.dtype)
    return known[: bits.numel()]


def _precision(dtype: torch.dtype) -> float:
    """Relative error of a rounding; of a narrow value, where float32 decides it."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    own, computed = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    return float((own * min(own, computed)) ** 0.5)


def _shown(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    shown = ", ".join(names[:SHOWN_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown
