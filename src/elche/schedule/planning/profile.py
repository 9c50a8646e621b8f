"""Measured profiles of layers and devices: the planner's input.

Times and bytes are per microbatch. A layer has times per *kind* of device; a device's
`speed` scales the times of its kind, so that each kind is measured once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from elche.config_checks import (
    check_fields,
    check_not_negative,
    check_positive,
    is_number,
)
from elche.errors import ConfigError

LINK_EFFICIENCY = 0.8
"""Default efficiency of a declared rate. Reductions over links shaped to 10 and 100
Mbit/s take 1.1 to 1.4 times their ideal time, if the cores keep up
(docs/benchmarks.md, "Behind a slow link").
"""
ANY_KIND = ""
ADAM_STATE_FACTOR = 4.0  # parameter, gradient and Adam's two moments, of one dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of one layer on one kind of device, for one microbatch.

    Attributes:
        forward_s: time of F.
        input_gradient_s: time of I.
        weight_gradient_s: time of W.
        backward_s: time of B, the whole backward at once; None means I + W.
        message_s: time for which a device of this kind is busy to send the layer's
            output, or to receive it.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    backward_s: float | None = None
    message_s: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, not_negative=self.__dataclass_fields__)

    @property
    def full_backward_s(self) -> float:
        """Time of B."""
        if self.backward_s is None:
            return self.input_gradient_s + self.weight_gradient_s
        return self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer.

    Attributes:
        times: times by kind of device; `ANY_KIND` is the default for unlisted kinds.
        name: layer's name for messages.
        activation_bytes: bytes per microbatch, held from F to B or W.
        output_bytes: size of the message to the next device; its gradient is as large.
        parameter_bytes: bytes of parameters alone, see `PipelineProfile.state_factor`.
    """

    times: Mapping[str, LayerTimes]
    name: str = "layer"
    activation_bytes: float = 0.0
    output_bytes: float = 0.0
    parameter_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_name(self.name)
        sizes = ("activation_bytes", "output_bytes", "parameter_bytes")
        check_fields(self, not_negative=sizes)
        if not self.times:
            raise ConfigError(f"{self.name} has no times for any kind of device")

    def times_on(self, kind: str) -> LayerTimes:
        """Times on a kind of device."""
        found = self.times.get(kind, self.times.get(ANY_KIND))
        if found is None:
            raise ConfigError(
                f"{self.name} has times for devices of kind "
                f"{', '.join(map(repr, sorted(self.times)))}, none for {kind!r}; "
                "measure it there, or name a kind that was measured and a speed"
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device.

    Attributes:
        name: device's name in the plan and in links.
        kind: kind that selects the layer times.
        speed: divisor of those times.
        memory_bytes: memory for parameters, gradients, optimizer state, activations.
    """

    name: str
    kind: str = ANY_KIND
    speed: float = 1.0
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        _check_name(self.name)
        check_positive(f"speed of device {self.name}", self.speed)
        if not self.memory_bytes > 0:
            raise ConfigError(
                f"device {self.name}: expected memory_bytes above 0, got "
                f"{self.memory_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """A link between two devices, full duplex.

    Attributes:
        latency_s: latency of a message of any size.
        bytes_per_s: nominal rate per direction.
        efficiency: fraction of the rate that payload reaches; 1.0 if ``bytes_per_s``
            was measured with payload.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    efficiency: float = LINK_EFFICIENCY

    def __post_init__(self) -> None:
        check_not_negative("latency_s", self.latency_s)
        if not self.bytes_per_s > 0:
            raise ConfigError(f"expected bytes_per_s above 0, got {self.bytes_per_s}")
        check_efficiency(self.efficiency)

    def transfer_s(self, message_bytes: float) -> float:
        """Time for which a message occupies the link."""
        return message_bytes / (self.efficiency * self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProfile:
    """A model and the devices to train it on.

    Attributes:
        layers: layers in the model's order.
        devices: devices in any order.
        link: default link between two devices.
        links: own links, by two device indices, the lower index first.
        state_factor: bytes that a device holds per byte of parameters: the parameter,
            its gradient, the optimizer's state. 4 is Adam in one dtype.
    """

    layers: tuple[LayerProfile, ...]
    devices: tuple[DeviceProfile, ...]
    link: LinkProfile = field(default_factory=LinkProfile)
    links: Mapping[tuple[int, int], LinkProfile] = field(default_factory=dict)
    state_factor: float = ADAM_STATE_FACTOR

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("there are no devices to plan for; name at least one")
        if not self.layers:
            raise ConfigError("the model has no layers")
        if not is_number(self.state_factor) or not 1 <= self.state_factor < math.inf:
            raise ConfigError(
                "expected a state_factor of at least 1 (the parameters themselves), "
                f"got {self.state_factor}"
            )
        names = [each.name for each in self.devices]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two devices are called {twice[0]!r}")
        for low, high in self.links:
            if not 0 <= low < high < len(self.devices):
                raise ConfigError(
                    f"a link joins two different devices of {len(self.devices)}, the "
                    f"lower index first; got {low} and {high}"
                )
        for layer in self.layers:
            for device in self.devices:
                layer.times_on(device.kind)

    def link_between(self, one: int, other: int) -> LinkProfile:
        """Link between two devices, given by index."""
        return self.links.get((min(one, other), max(one, other)), self.link)


def _check_name(name: str) -> None:
    if not name:
        raise ConfigError("expected a name of at least one character, got ''")


def check_efficiency(efficiency: float) -> None:
    """Rejects an efficiency outside (0, 1]."""
    if not 0.0 < efficiency <= 1.0:
        raise ConfigError(
            f"efficiency must be above 0 and at most 1, got {efficiency!r}; it is the "
            "part of bytes_per_s that payload reaches"
        )
