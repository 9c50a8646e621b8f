"""Planner: partition, schedule and predicted step time from layers and devices.

1. Compute exact partitions (`partition`) for one stage per device, two in V placement
   and several interleaved; for the best orders of the devices; and with memory for one,
   some or many microbatches.
2. Time them all. Refine the best by moving layers while the simulated step gets
   shorter, and by dropping devices.
3. Simulate every published schedule and `auto` on the best partitions. The plan is the
   shortest step that fits the memory; the others are its alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, pairwise, zip_longest

from elche.errors import ConfigError
from elche.schedule.generators.auto import auto_schedule
from elche.schedule.generators.looped import LOOPED
from elche.schedule.generators.schedules import (
    FIXED_SCHEDULES,
    V_SHAPED,
    make_schedule,
    placement_for,
)
from elche.schedule.planning.device_orders import device_orders
from elche.schedule.planning.partition import (
    Partition,
    ProfileTable,
    best_partition,
    costs_of,
    link_bound,
    sum_bound,
)
from elche.schedule.planning.partition_search import (
    Evaluator,
    best_named,
    fits,
    refine,
)
from elche.schedule.planning.plan import (
    Alternative,
    Candidate,
    Plan,
    PlanConfig,
    ideal_step_s,
)
from elche.schedule.planning.profile import PipelineProfile
from elche.schedule.timing import simulate

REFINED_ACTIONS = 100_000  # budget of timed actions to refine one partition
KEPT_ORDERS = 4
REFINED_STARTS = 2
TRIES = 12  # most partitions tried per published schedule...
TRIED_ACTIONS = 40_000  # ...and their total budget of actions
NAMED_ACTIONS = 60_000  # budget of timed actions per published schedule
AUTO_PLACEMENTS = 4
AUTO_PARTITIONS = 2  # partitions tried per placement for auto
_TOLERANCE = 1e-9


def plan_pipeline(profile: PipelineProfile, config: PlanConfig) -> Plan:
    """Chooses the partition and schedule of least step time that fit the memory.

    Raises:
        ConfigError: more devices than layers where all must be used, no partition fits
            the memory, or the requested schedule cannot run.
    """
    search = _PlanSearch(profile, config)
    search.find_partitions()
    names = (*FIXED_SCHEDULES, "auto")
    alternatives = {name: search.alternative(name) for name in names}
    wanted = names if config.schedule == "auto" else (config.schedule,)
    able = [
        each.candidate
        for each in map(alternatives.__getitem__, wanted)
        if each.candidate is not None and not each.reason
    ]
    if not able:
        reason = alternatives[config.schedule].reason
        raise ConfigError(f"the schedule {config.schedule} cannot run here: {reason}")
    shortest = min(each.step_s for each in able) * (1 + _TOLERANCE)
    chosen = min(
        (each for each in able if each.step_s <= shortest),
        key=lambda each: sum(each.memory_bytes),
    )
    used = set(chosen.partition.devices)
    return Plan(
        chosen=chosen,
        alternatives=tuple(alternatives.values()),
        equal_split=search.equal_split(),
        unused=tuple(sorted(set(range(len(profile.devices))) - used)),
        ideal_s=ideal_step_s(profile, config.num_microbatches),
        bound_s=search.bound_s,
    )


class _PlanSearch:
    """Search for good partitions, and for schedules on them."""

    def __init__(self, profile: PipelineProfile, config: PlanConfig) -> None:
        self.profile, self.config = profile, config
        self.table = ProfileTable(profile, config.num_microbatches)
        self.count = config.num_microbatches
        self.evaluator = Evaluator(self.table)
        self.exact: dict[Partition, None] = {}
        self.starts: list[Partition] = []  # best partition per shape before refinement
        self.bound_s = math.inf

    def find_partitions(self) -> None:
        """Times good partitions of every shape."""
        num_devices, num_layers = len(self.profile.devices), len(self.profile.layers)
        if self.config.use_all_devices and num_devices > num_layers:
            raise ConfigError(
                f"expected a layer for each of {num_devices} devices, got {num_layers} "
                "layers; cut the model finer, or let devices go unused"
            )
        orders = device_orders(self.table, min(self.count, num_devices))
        found = self._partitions(orders[:KEPT_ORDERS], 1) or self._partitions(orders, 1)
        if not found:
            raise ConfigError(self._shortage())
        self.bound_s = min(sum_bound(self.table, each) for each in found)
        best = self._drop_devices(self._refined(found))
        used = set(best.ranks)
        orders = [best.ranks] + [
            tuple(device for device in order if device in used) for order in orders
        ]
        orders = list(dict.fromkeys(orders))[:KEPT_ORDERS]
        if len(used) > 1:
            self._refined(self._partitions(orders, 2, is_v=True))
            if self.config.stages_per_device > 1:
                self._refined(self._partitions(orders, self.config.stages_per_device))

    def alternative(self, name: str) -> Alternative:
        """A schedule on its best partition."""
        if name == "auto":
            made = [self._candidate(name, each) for each in self._for_auto()]
            shortest = min(made, key=lambda each: each.step_s)
            return Alternative(name=name, candidate=shortest)
        placements = self._placements(name)
        starts = self._affordable(self._suiting(placements), TRIES)
        given = name, starts, placements, NAMED_ACTIONS
        best, reason = best_named(self.evaluator, *given)
        if best is None:
            reason = reason or self._why_not(name)
            return Alternative(name=name, candidate=None, reason=reason)
        candidate = self._candidate(name, best)
        if candidate.missing_bytes == 0:
            return Alternative(name=name, candidate=candidate)
        lacks = candidate.lacking_bytes
        device = self.profile.devices[best.ranks[lacks.index(max(lacks))]]
        return Alternative(
            name=name,
            candidate=candidate,
            reason=f"device {device.name} lacks {max(lacks):,.0f} bytes",
        )

    def equal_split(self) -> Candidate | None:
        """1F1B with equally many layers per device, in the order of the profile."""
        devices, layers = len(self.profile.devices), len(self.profile.layers)
        if devices > layers:
            return None
        each, rest = divmod(layers, devices)
        sizes = tuple(each + (stage < rest) for stage in range(devices))
        partition = Partition(tuple(range(devices)), sizes)
        does_fit = fits(self.table, partition)
        return self._candidate("1f1b", partition) if does_fit else None

    def _partitions(
        self, orders: Iterable[tuple[int, ...]], stages: int, is_v: bool = False
    ) -> list[Partition]:
        """Exact partitions for several stages per device."""
        found: dict[Partition, None] = {}
        may_be_empty = [False] if self.config.use_all_devices else [True, False]
        for order in orders:
            devices = (*order, *reversed(order)) if is_v else order * stages
            for held in self._rooms(len(order), stages):
                for empty in may_be_empty:
                    if empty or len(devices) <= len(self.profile.layers):
                        partition = best_partition(self.table, devices, held, empty)
                        if partition is not None:
                            found[partition] = None
        self.exact.update(found)
        return list(found)

    def _rooms(self, ranks: int, stages: int) -> list[tuple[int, ...]]:
        """Choices of the number of microbatches to reserve memory for, per place."""
        places, most = ranks * stages, min(self.count, ranks)
        if all(each.memory_bytes == math.inf for each in self.profile.devices):
            return [(1,) * places]
        falling = (min(self.count, ranks - place % ranks) for place in range(places))
        rooms = [(most,) * places, tuple(falling), (1,) * places]
        return list(dict.fromkeys(rooms))

    def _refined(self, starts: list[Partition]) -> Partition:
        """Refines the best starts and returns the best partition so far."""
        fitting = [one for one in starts if self.evaluator.step_s(one) < math.inf]
        ranked = sorted(fitting, key=self.evaluator.step_s)
        self.starts += ranked[:1]
        for start in ranked[:REFINED_STARTS]:
            refine(self.evaluator, start, REFINED_ACTIONS)
        return self.evaluator.ranked()[0]

    def _drop_devices(self, best: Partition) -> Partition:
        """Drops devices one by one while the simulated step gets shorter."""
        improved = not self.config.use_all_devices
        while improved and len(best.ranks) > 1:
            orders = [
                tuple(device for device in best.ranks if device != dropped)
                for dropped in best.ranks
            ]
            found = self._partitions(orders, 1)
            fewer = min(found, key=self.evaluator.step_s, default=best)
            fewer_s = self.evaluator.step_s(fewer)
            improved = fewer_s < self.evaluator.step_s(best) * (1 - _TOLERANCE)
            if improved:
                best = refine(self.evaluator, fewer, REFINED_ACTIONS)
        return best

    def _placements(self, name: str) -> list[tuple[int, ...]]:
        """Placements of a schedule on different numbers of devices."""
        most = len(self.profile.devices)
        stages = self.config.stages_per_device if name in LOOPED else None
        least = most if self.config.use_all_devices else 1
        least = max(least, 2 if name in LOOPED + V_SHAPED else 1)
        return [placement_for(name, n, stages) for n in range(least, most + 1)]

    def _suiting(self, placements: list[tuple[int, ...]]) -> Iterator[Partition]:
        """Yields partitions in these placements, refined and exact ones in turn."""
        ranked = [e for e in self.evaluator.ranked() if e.placement in placements]
        exact = [each for each in ranked if each in self.exact]
        mixed = chain.from_iterable(zip_longest(ranked, exact))
        yield from dict.fromkeys(each for each in mixed if each is not None)

    def _for_auto(self) -> list[Partition]:
        """Best partitions of each placement, and the best start of each shape."""
        by_placement: dict[tuple[int, ...], list[Partition]] = {}
        for each in self.evaluator.ranked():
            by_placement.setdefault(each.placement, []).append(each)
        chosen = [
            each
            for some in islice(by_placement.values(), AUTO_PLACEMENTS)
            for each in some[:AUTO_PARTITIONS]
        ]
        return list(self._affordable(dict.fromkeys(self.starts + chosen), None))

    def _affordable(
        self, partitions: Iterable[Partition], most: int | None
    ) -> Iterator[Partition]:
        """The first partitions within the `TRIED_ACTIONS` budget; at least one."""
        left = TRIED_ACTIONS
        for each in islice(partitions, most):
            yield each
            left -= 3 * len(each.sizes) * self.count
            if left <= 0:
                return

    def _candidate(self, name: str, partition: Partition) -> Candidate:
        costs = costs_of(self.table, partition)
        if name == "auto":
            schedule = auto_schedule(costs, self.count)
        else:
            schedule = make_schedule(name, replace(costs, memory=()), self.count)
        timing = simulate(schedule, costs)
        return Candidate(
            name=name,
            partition=partition,
            schedule=schedule,
            costs=costs,
            timing=timing,
            step_s=max(timing.makespan, link_bound(self.table, partition)),
            state_bytes=tuple(self.table.held_bytes(self.table.state, partition)),
        )

    def _why_not(self, name: str) -> str:
        each = self.config.stages_per_device if name in LOOPED else 2
        ranks = len(self.evaluator.ranked()[0].ranks)
        if ranks == 1:
            return "one device is enough, where several stages gain nothing"
        layers = len(self.profile.layers)
        if (name in V_SHAPED or name in LOOPED) and each * ranks > layers:
            return f"{each} stages on each of {ranks} devices exceed {layers} layers"
        return "no partition into its stages fits the memory"

    def _shortage(self) -> str:
        """Error text that compares the layers' memory with the devices'."""
        rooms = [each.memory_bytes for each in self.profile.devices]
        pairs = zip(self.table.state, self.table.activation, strict=True)
        sums = [state + activation for state, activation in pairs]
        needed = [after - before for before, after in pairwise(sums)]
        most = max(needed)
        name = self.profile.layers[needed.index(most)].name
        unused = "let devices go unused, " if self.config.use_all_devices else ""
        return (
            f"no partition fits the memory: the layers need {sums[-1]:,.0f} bytes for "
            "their parameters, their state and one microbatch of activations, the "
            f"largest layer ({name}) {most:,.0f}; the devices have "
            f"{sum(rooms):,.0f}, each {max(rooms):,.0f} at most; {unused}add devices, "
            "cut large layers, or use smaller microbatches"
        )
