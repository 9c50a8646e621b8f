"""Scalars that users log, without waiting for the device.

A tensor is copied into a buffer on its device. When a window closes, the buffer's copy
to the host is enqueued behind its work. The values count once the copy is done, perhaps
in a later window. The host computes in double precision.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator

import torch

from elche.coordination.accounts.metrics import WeightedMean
from elche.coordination.protocol.messages import Scalars
from elche.devices import streams
from elche.devices.memory import widest_float
from elche.errors import ConfigError

MAX_NAME_CHARS = 200
BUFFER_VALUES = 256
_Entries = list[tuple[str, float]]
"""Name and weight of each value in a buffer."""
_Place = tuple[torch.device, torch.Stream | None]


class Readback:
    """A copy of a device's values to the host; asynchronous if the device has streams.

    Args:
        values: tensor on the device; not to be changed from now on.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._host, self._event = values, None  # read when they are asked for
        device = values.device
        if streams.has_streams(device):
            self._host = streams.host_memory(values.shape, values.dtype, device)
            self._host.copy_(values, non_blocking=True)
            self._event = streams.record_event(device)

    def is_done(self) -> bool:
        """True if the copy is complete; does not wait."""
        return self._event is None or bool(self._event.query())

    def values(self) -> list[float]:
        """Waits for the values, and returns them."""
        if self._event is not None:
            self._event.synchronize()
        floats: list[float] = self._host.tolist()
        return floats


class ScalarLog:
    """Scalars that this rank has logged since the last window closed."""

    def __init__(self) -> None:
        self._means: dict[str, WeightedMean] = {}
        self._filling: dict[_Place, tuple[torch.Tensor, _Entries]] = {}
        self._under_way: list[tuple[_Entries, Readback]] = []

    def log(self, name: str, value: float | torch.Tensor, weight: float) -> None:
        """Adds a value to the mean of its name.

        Args:
            name: name of the scalar.
            value: a real number, or a tensor that holds one; it may be overwritten
                afterwards.
            weight: weight of the value in the mean, such as its samples; zero adds
                nothing.

        Raises:
            ConfigError: the name is invalid, the value no real scalar, or the weight
                negative or not finite.
        """
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            raise ConfigError(
                f"expected the name of a scalar to be a string of 1 to "
                f"{MAX_NAME_CHARS} characters, got {str(name)[:40]!r}"
            )
        if not (isinstance(weight, numbers.Real) and 0.0 <= float(weight) < math.inf):
            raise ConfigError(
                f"scalar {name!r}: expected a weight that is finite and not negative, "
                f"got {weight!r}"
            )
        weight = float(weight)
        if not isinstance(value, torch.Tensor):
            number = _real(name, value)
            if weight:
                self._add(name, number, weight)
        elif value.numel() != 1 or value.is_complex():
            raise ConfigError(
                f"scalar {name!r}: expected one real number, got a tensor of shape "
                f"{list(value.shape)} and {value.dtype}; log its mean, say"
            )
        elif weight:
            self._keep(name, value.detach(), weight)

    def drain(self, *, final: bool = False) -> Scalars:
        """Removes and returns values received since the last call.

        Args:
            final: wait for everything that was logged.

        Returns:
            (name, weighted sum, weight) in the order of names. An entry with an
            infinite sum counts non-finite values: its weight is their number.
        """
        for key in list(self._filling):
            self._send(key)
        waiting = []
        for entries, readback in self._under_way:
            if not final and not readback.is_done():
                waiting.append((entries, readback))
                continue
            for (name, weight), value in zip(entries, readback.values(), strict=False):
                self._add(name, value, weight)
        self._under_way = waiting
        means, self._means = self._means, {}
        return tuple(entry for name in sorted(means) for entry in _entries(name, means))

    def clear(self) -> None:
        """Drops logged values without waiting, after an epoch that was left early."""
        self._means.clear()
        self._filling.clear()
        self._under_way.clear()

    def _add(self, name: str, value: float, weight: float) -> None:
        mean = self._means.setdefault(name, WeightedMean())
        product = value * weight
        if math.isfinite(product):
            mean.add(product, weight)
        else:
            mean.exclude(1)

    def _keep(self, name: str, value: torch.Tensor, weight: float) -> None:
        """Copies a value on its device: one kernel, enqueued."""
        device = value.device
        stream = streams.current_stream(device) if streams.has_streams(device) else None
        if (device, stream) not in self._filling:
            self._filling[device, stream] = empty_buffer(device), []
        values, entries = self._filling[device, stream]
        values[len(entries)].copy_(value.reshape(()))
        entries.append((name, weight))
        if len(entries) == BUFFER_VALUES:
            self._send((device, stream))

    def _send(self, place: _Place) -> None:
        """Begins a buffer's copy, on the stream that has filled it."""
        (values, entries), stream = self._filling.pop(place), place[1]
        with streams.beside(stream):
            self._under_way.append((entries, Readback(values)))


def empty_buffer(device: torch.device) -> torch.Tensor:
    """Buffer of doubles, if the device has them; usable in any autograd mode."""
    with torch.inference_mode(False):
        return torch.zeros(BUFFER_VALUES, dtype=widest_float(device), device=device)


def _entries(
    name: str, means: dict[str, WeightedMean]
) -> Iterator[tuple[str, float, float]]:
    mean = means[name]
    weighted_sum, weight = mean.parts
    if weight and mean.value is not None:
        yield name, weighted_sum, weight
    if mean.excluded:
        yield name, math.inf, float(mean.excluded)


def _real(name: str, value: object) -> float:
    try:
        if isinstance(value, numbers.Real):
            return float(value)
    except OverflowError:
        pass
    raise ConfigError(
        f"scalar {name!r}: expected a real number or a tensor of one, got "
        f"{str(value)[:40]!r} of type {type(value).__name__}"
    )
