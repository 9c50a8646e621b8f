"""Checksums of a rank's parameters, on their device, for comparison between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, final

import torch

from elche.coordination.accounts.model_checks import ModelCheck, plan_slices
from elche.coordination.protocol.messages import CheckRows
from elche.devices.choice import product_name
from elche.devices.memory import widest_float
from elche.runtime.report.scalars import Readback

SHOWN_NAMES = 3
FLOAT32 = torch.finfo(torch.float32).eps
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B1
_Key: TypeAlias = tuple[torch.dtype, torch.device]
_odd_numbers: dict[_Key, torch.Tensor] = {}


@final
class ModelSums:
    """Sums over slices of tensors, as they are laid out now.

    Args:
        named: names and tensors, in one order on all ranks.
        kind: kind of this rank's device.
    """

    def __init__(
        self, named: Iterable[tuple[str, torch.Tensor]], kind: str = ""
    ) -> None:
        self._slices: list[tuple[ModelCheck, list[tuple[torch.Tensor, int, int]]]] = []
        self._begun: list[tuple[ModelCheck, Readback, Readback]] = []
        alike: dict[_Key, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in named:
            alike.setdefault((tensor.dtype, tensor.device), []).append((name, tensor))
        for (kept, _), group in alike.items():
            dtype = kept.to_real()
            shapes = [(len(t), t[:1].numel()) if t.dim() else (1, 1) for _, t in group]
            for pieces in plan_slices(shapes):
                names = [group[at][0] for at, _, _ in pieces]
                what = ", ".join(names[:SHOWN_NAMES])
                if len(names) > SHOWN_NAMES:
                    what += f" and {len(names) - SHOWN_NAMES} more"
                values = sum((stop - a) * shapes[at][1] for at, a, stop in pieces)
                # Devices compute narrow values in float32, which decides a rounding.
                eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
                precision = (eps * min(eps, FLOAT32)) ** 0.5
                check = ModelCheck(0, what, kind, 0, values, precision, 0.0, 0.0)
                tensors = [(group[at][1], start, stop) for at, start, stop in pieces]
                self._slices.append((check, tensors))

    @torch.no_grad()
    def begin(
        self, at: int, turn: int, common: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Begins to sum a slice; does not wait for the device.

        Args:
            at: the step or window.
            turn: number of the slice, modulo their count.
            common: replacements of tensors, by the ids of these.
        """
        if not self._slices:
            return
        check, pieces = self._slices[turn % len(self._slices)]
        held = common or {}
        rows = [_flat(held.get(id(t), t), a, b) for t, a, b in pieces]
        # Frozen parameters are on the device, beside common values on the host.
        flat = torch.cat([each.cpu() for each in rows] if held else rows)
        bits = flat.view(_BITS[flat.element_size()])
        # A sign alone would change the product by half its range, and many cancel.
        bits = bits ^ (bits >> 15)
        bits = (bits * _odd(bits)).sum(dtype=torch.int64).view(1)
        wide = flat.to(widest_float(flat.device))
        sums = torch.stack([wide.sum(), torch.dot(wide, wide)])
        begun = check._replace(at=at), Readback(bits), Readback(sums)
        self._begun.append(begun)

    def take(self, until: int) -> CheckRows:
        """Waits for checks begun up to this step or window, and returns them."""
        begun = [each for each in self._begun if each[0].at <= until]
        self._begun = self._begun[len(begun) :]
        rows = []
        for check, bits, sums in begun:
            total, squares = sums.values()
            number = int(bits.values()[0])
            rows.append(check._replace(bits=number, total=total, squares=squares))
        return tuple(rows)

    def whole(self) -> CheckRows:
        """Checks of all slices; waits for the device."""
        for turn in range(len(self._slices)):
            self.begin(turn, turn)
        return self.take(len(self._slices))


def kind_of(device: torch.device) -> str:
    """The kind of a device; on CPUs large sums also depend on the number of threads."""
    if device.type != "cpu":
        return product_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {capability}, {torch.get_num_threads()} threads"


def _flat(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    rows = tensor.detach()[start:stop] if tensor.dim() else tensor.detach()
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    return rows.reshape(-1)


def _odd(bits: torch.Tensor) -> torch.Tensor:
    """Odd factors, one per value, so that the sum depends on the order of values."""
    key = bits.dtype, bits.device
    known = _odd_numbers.get(key)
    if known is None or known.numel() < bits.numel():
        numbers = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device)
        known = _odd_numbers[key] = (numbers * _ODD >> 8 | 1).to(bits.dtype)
    return known[: bits.numel()]
