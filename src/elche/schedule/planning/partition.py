"""Exact partition of consecutive layers over devices, with the least *sum-bound*.

The sum-bound is a lower bound of the makespan if each device has one stage. It is the
maximum over the devices of the time until the first microbatch arrives, messages
included, plus all the device's work. The link before a device counts like a device: its
messages pass one after another, separately in each direction.

The dynamic program runs from the model's end to its beginning. Earlier devices only
delay later ones, so the best last layer of a device depends only on its first layer.
The program costs O(k L^2 + k^2 L) for L layers and k places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from elche.errors import ConfigError
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.planning.profile import PipelineProfile

HALF_BYTE = 0.5
"""Bytes added to memory limits, to keep them above 0. Activations are whole bytes."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Assignment of layers to stages and ranks.

    Attributes:
        devices: index of the device of each stage, in the model's order.
        sizes: number of layers of each stage, at least one.
    """

    devices: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Device of each pipeline rank, in the order of the devices' first stages."""
        return tuple(dict.fromkeys(self.devices))

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        ranks = self.ranks
        return tuple(ranks.index(device) for device in self.devices)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First layer of each stage, followed by the number of layers."""
        return tuple(accumulate(self.sizes, initial=0))

    def layers_of(self, device: int) -> tuple[tuple[int, int], ...]:
        """First and last layer of each stage of a device; empty if it has none."""
        bounds = self.boundaries
        return tuple(
            (bounds[stage], bounds[stage + 1] - 1)
            for stage, holder in enumerate(self.devices)
            if holder == device
        )


class ProfileTable:
    """Sums over the layers of a profile, for the inner loops.

    Attributes:
        times: seconds of F, I, W and B per device and microbatch, as prefix sums over
            the layers.
        state: bytes of parameters, gradients and optimizer state, as prefix sums.
        activation: bytes of one microbatch, as prefix sums; in whole bytes, so that
            sums are exact.
        memory: whole bytes of each device.
        has_whole_backward: whether any layer has its own time for B.
    """

    def __init__(self, profile: PipelineProfile, num_microbatches: int) -> None:
        self.profile, self.count = profile, num_microbatches
        layers = profile.layers
        self.times = []
        for device in profile.devices:
            on = [layer.times_on(device.kind) for layer in layers]
            parts = (
                (one.forward_s for one in on),
                (one.input_gradient_s for one in on),
                (one.weight_gradient_s for one in on),
                (one.full_backward_s for one in on),
            )
            self.times.append([_sums(s / device.speed for s in part) for part in parts])
        every = [times for layer in layers for times in layer.times.values()]
        self.has_whole_backward = any(one.backward_s is not None for one in every)
        limits = [device.memory_bytes for device in profile.devices]
        self.memory = [one if one == math.inf else one // 1 for one in limits]
        factor = profile.state_factor
        self.state = _sums(math.ceil(factor * one.parameter_bytes) for one in layers)
        self.activation = _sums(math.ceil(one.activation_bytes) for one in layers)

    def work(self, device: int, begin: int, end: int) -> float:
        """Seconds of a stage per step: F, and the cheaper of B and I + W."""
        parts = (sums[end] - sums[begin] for sums in self.times[device])
        forward, inputs, weights, whole = parts
        return self.count * (forward + min(whole, inputs + weights))

    def message_s(self, boundary: int, one: int, other: int) -> tuple[float, float]:
        """Time of a message to layer `boundary`, and the part of it on the link."""
        if one == other:
            return 0.0, 0.0
        link = self.profile.link_between(one, other)
        transfer = link.transfer_s(self.profile.layers[boundary - 1].output_bytes)
        return link.latency_s + transfer, transfer

    def busy_s(self, boundary: int, device: int, other: int) -> float:
        """Time for which a message keeps `device` busy."""
        if device == other:
            return 0.0
        one = self.profile.devices[device]
        return (
            self.profile.layers[boundary - 1].times_on(one.kind).message_s / one.speed
        )

    def held_bytes(self, sums: list[float], partition: Partition) -> list[float]:
        """Bytes that each rank's layers hold, of `state` or `activation`."""
        bounds, held = partition.boundaries, [0.0] * len(partition.ranks)
        for stage, rank in enumerate(partition.placement):
            held[rank] += sums[bounds[stage + 1]] - sums[bounds[stage]]
        return held


def best_partition(
    table: ProfileTable,
    devices: tuple[int, ...],
    held: tuple[int, ...],
    may_be_empty: bool = True,
) -> Partition | None:
    """Partition of least sum-bound for given places, which are devices in model order.

    Args:
        table: sums over the profile of model and devices.
        devices: device of each place. The memory of a device with several places is
            divided evenly among them.
        held: for each place, the number of microbatches whose activations must fit.
        may_be_empty: whether a place may get no layers.

    Returns:
        None if no partition fits the memory.
    """
    num_layers = len(table.profile.layers)
    best: list[list[float]] = [[] for _ in devices]
    ends: list[list[int]] = [[] for _ in devices]
    nexts: list[list[int]] = []
    for place, device in reversed(list(enumerate(devices))):
        last = len(devices) if may_be_empty else min(place + 2, len(devices))
        is_last = may_be_empty or place == len(devices) - 1
        rest, following = _continuations(table, devices[:last], best, place, is_last)
        nexts.append(following)
        room = table.memory[device] / devices.count(device)
        best[place], ends[place] = _ends(table, device, held[place], room, rest)
    nexts.reverse()
    starts = range(len(devices)) if may_be_empty else range(1)
    place = min(starts, key=lambda each: best[each][0])
    if best[place][0] == math.inf:
        return None
    chosen, sizes, at = [], [], 0
    while at < num_layers:
        end = ends[place][at]
        chosen.append(devices[place])
        sizes.append(end - at)
        place, at = nexts[place][end], end
    return Partition(tuple(chosen), tuple(sizes))


def sum_bound(table: ProfileTable, partition: Partition) -> float:
    """The objective of `best_partition`, in seconds.

    A lower bound of the makespan if each device has one stage. With several stages on a
    device each stage counts separately.
    """
    bounds, most = partition.boundaries, 0.0
    for stage, (left, transfer, arrived) in enumerate(
        _first_microbatch(table, partition)
    ):
        work = table.work(partition.devices[stage], bounds[stage], bounds[stage + 1])
        most = max(most, left + table.count * transfer, arrived + work)
    return most


def link_bound(table: ProfileTable, partition: Partition) -> float:
    """Seconds until the busiest link has sent a step's messages in one direction.

    Includes the time until the first microbatch's forward reaches the link. No real
    step is shorter; `timing` may be, because its messages overlap each other.
    """
    devices, ends = partition.devices, dict[frozenset[int], float]()
    for stage, (left, transfer, _) in enumerate(_first_microbatch(table, partition)):
        pair = frozenset(devices[max(stage - 1, 0) : stage + 1])
        ends[pair] = ends.get(pair, left) + table.count * transfer
    return max(ends.values())


def _first_microbatch(
    table: ProfileTable, partition: Partition
) -> Iterator[tuple[float, float, float]]:
    """Per stage: time when the first forward reaches the link, transfer, arrival."""
    bounds, devices, reached = partition.boundaries, partition.devices, 0.0
    for stage, device in enumerate(devices):
        left, transfer = reached, 0.0
        if stage:
            one = devices[stage - 1]
            message, transfer = table.message_s(bounds[stage], one, device)
            reached += message
        yield left, transfer, reached
        forward = table.times[device][0]
        reached += forward[bounds[stage + 1]] - forward[bounds[stage]]


def _continuations(
    table: ProfileTable,
    devices: tuple[int, ...],
    best: list[list[float]],
    place: int,
    may_end: bool,
) -> tuple[list[float], list[int]]:
    """Least time bound of the later stages, and the place of the next stage.

    Both lists are indexed by the layer at which `place` ends. Time counts from when the
    first microbatch leaves `place`.
    """
    num_layers = len(table.profile.layers)
    rest = [math.inf] * (num_layers + 1)
    following = [-1] * (num_layers + 1)
    for other in range(place + 1, len(devices)):
        bounds = best[other]
        for at in range(1, num_layers):
            if bounds[at] < rest[at]:
                message, transfer = table.message_s(at, devices[place], devices[other])
                bound = max(table.count * transfer, message + bounds[at])
                if bound < rest[at]:
                    rest[at], following[at] = bound, other
    if may_end:
        rest[num_layers] = 0.0
    return rest, following


def _ends(
    table: ProfileTable, device: int, held: int, room: float, rest: list[float]
) -> tuple[list[float], list[int]]:
    """Least bound and last layer of a place, as lists over its first layer."""
    forward, inputs, weights, backward = table.times[device]
    three = zip(forward, inputs, weights, strict=True)
    split = [table.count * sum(each) for each in three]
    whole = [table.count * sum(each) for each in zip(forward, backward, strict=True)]
    needed = [
        state + held * activation
        for state, activation in zip(table.state, table.activation, strict=True)
    ]
    num_layers = len(forward) - 1
    best, ends = [math.inf] * (num_layers + 1), [0] * (num_layers + 1)
    for begin in range(num_layers):
        before, before_whole, leaves = split[begin], whole[begin], forward[begin]
        found, most = math.inf, room + needed[begin]
        for end in range(begin + 1, num_layers + 1):
            own = split[end] - before
            if whole[end] - before_whole < own:
                own = whole[end] - before_whole
            if own >= found or needed[end] > most:
                break
            bound = forward[end] - leaves + rest[end]
            if own > bound:
                bound = own
            if bound < found:
                found, ends[begin] = bound, end
        best[begin] = found
    return best, ends


def _sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def costs_of(table: ProfileTable, partition: Partition) -> PipelineCosts:
    """Costs of a partition's stages, in seconds and bytes."""
    bounds, devices = partition.boundaries, partition.devices
    stages, links = [], []
    for stage, device in enumerate(devices):
        begin, end = bounds[stage], bounds[stage + 1]
        sums = (*table.times[device], table.activation)
        forward, inputs, weights, whole, activation = (
            max(0.0, one[end] - one[begin]) for one in sums
        )
        # A stage receives and sends once in F, and once in its backward.
        messages_s = sum(
            table.busy_s(bounds[max(stage, other)], device, devices[other])
            for other in (stage - 1, stage + 1)
            if 0 <= other < len(devices)
        )
        stages.append(
            StageCost(
                forward=messages_s + forward,
                input_gradient=messages_s + inputs,
                weight_gradient=weights,
                backward=messages_s + whole if table.has_whole_backward else None,
                activation=activation,
            )
        )
        if stage:
            links.append(table.message_s(begin, devices[stage - 1], device)[0])
    limits = []
    states = table.held_bytes(table.state, partition)
    for device, state in zip(partition.ranks, states, strict=True):
        room = table.memory[device] - state
        if room < 0:
            raise ConfigError(
                f"device {table.profile.devices[device].name} lacks {-room:,.0f} bytes "
                f"for the parameters of its layers and their state ({state:,.0f})"
            )
        limits.append(room + HALF_BYTE)
    return PipelineCosts(
        stages=tuple(stages),
        placement=partition.placement,
        num_ranks=len(partition.ranks),
        links=tuple(links),
        memory=tuple(limits),
    )
