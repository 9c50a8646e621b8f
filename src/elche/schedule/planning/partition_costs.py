"""Costs of a partition: stages, links and memory for `timing` and `auto`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elche.errors import ConfigError
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.planning.partition import Partition, ProfileTable


def costs_of(table: ProfileTable, partition: Partition) -> PipelineCosts:
    """Costs of a partition's stages, in seconds and bytes.

    Args:
        table: of model and devices.
        partition: of its layers. Its ranks are those of the costs.

    Raises:
        ConfigError: a device's memory does not hold its parameters and their state.
    """
    bounds, devices = partition.boundaries, partition.devices
    stages, links = [], []
    for stage, device in enumerate(devices):
        begin, end = bounds[stage], bounds[stage + 1]
        # A stage receives and sends once in F, and once in its backward.
        messages_s = sum(
            table.busy_s(bounds[max(stage, other)], device, devices[other])
            for other in (stage - 1, stage + 1)
            if 0 <= other < len(devices)
        )

        def part(sums: list[float], begin: int = begin, end: int = end) -> float:
            return max(0.0, sums[end] - sums[begin])

        stages.append(
            StageCost(
                forward=messages_s + part(table.forward[device]),
                input_gradient=messages_s + part(table.backward_input[device]),
                weight_gradient=part(table.weight[device]),
                backward=(
                    messages_s + part(table.backward[device])
                    if table.has_whole_backward
                    else None
                ),
                activation=part(table.activation),
                kept_for_weight=part(table.kept),
            )
        )
        if stage:
            links.append(table.message_s(begin, devices[stage - 1], device)[0])
    limits = []
    states = table.state_bytes(partition)
    for device, state in zip(partition.ranks, states, strict=True):
        room = table.memory[device] - state
        if room < 0:
            raise ConfigError(
                f"device {table.profile.devices[device].name} lacks {-room:,.0f} bytes "
                f"for the parameters of its layers and their state ({state:,.0f})"
            )
        limits.append(room + 0.5)  # a limit must be above 0; activations are whole
    return PipelineCosts(
        stages=tuple(stages),
        placement=partition.placement,
        num_ranks=len(partition.ranks),
        links=tuple(links),
        memory=tuple(limits),
    )


def link_bound(table: ProfileTable, partition: Partition) -> float:
    """Seconds until the busiest link has carried a step's messages of one direction.

    `timing` lets messages overlap each other; no step is shorter than this. Counted
    from the first microbatch's forward, until it first reaches the link.
    """
    bounds, devices = partition.boundaries, partition.devices
    ends: dict[tuple[int, int], float] = {}
    reached = 0.0
    for stage in range(1, len(devices)):
        one, other = devices[stage - 1], devices[stage]
        forward = table.forward[one]
        reached += forward[bounds[stage]] - forward[bounds[stage - 1]]
        message, transfer = table.message_s(bounds[stage], one, other)
        key = min(one, other), max(one, other)
        ends[key] = ends.get(key, reached) + table.count * transfer
        reached += message
    return max(ends.values(), default=0.0)


def shortage(
    table: ProfileTable, orders: Sequence[tuple[int, ...]]
) -> tuple[float, int, tuple[int, int]] | None:
    """Memory that the devices lack to hold the model.

    Of all partitions over the devices in the given orders, the one whose largest lack
    is least; one microbatch's activations are counted.

    Returns:
        Bytes lacking, device, and its first and last layer; None if a partition fits.
    """
    needed = [
        state + activation
        for state, activation in zip(table.state, table.activation, strict=True)
    ]
    found: tuple[float, int, tuple[int, int]] | None = None
    for order in orders:
        nearest = _nearest(needed, table.memory, order)
        if nearest[0] <= 0:
            return None
        if found is None or nearest[0] < found[0]:
            found = nearest
    return found


def _nearest(
    needed: list[float], memory: list[float], order: tuple[int, ...]
) -> tuple[float, int, tuple[int, int]]:
    """The least largest lack of memory for one order: bytes, device, layers."""
    num_layers = len(needed) - 1
    nowhere = (math.inf, -1, (0, 0))
    done: list[tuple[float, int, tuple[int, int]]] = [nowhere] * (num_layers + 1)
    done[num_layers] = (-math.inf, -1, (0, 0))
    for device in reversed(order):
        room = memory[device]
        earlier = list(done)
        for begin in range(num_layers):
            for end in range(begin + 1, num_layers + 1):
                lack = needed[end] - needed[begin] - room
                if lack >= earlier[begin][0]:
                    break
                own = (lack, device, (begin, end - 1))
                earlier[begin] = min(earlier[begin], max(own, done[end]))
        done = earlier
    return done[0]
