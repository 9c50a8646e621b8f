"""What `benchmarks.pipeline` runs: layers, emulated devices, and the plan for them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from elche.errors import ConfigError
from elche.schedule.actions import Schedule
from elche.schedule.costs import PipelineCosts
from elche.schedule.generators.schedules import FIXED_SCHEDULES
from elche.schedule.planning.plan import PlanConfig, ideal_step_s
from elche.schedule.planning.planner import plan_pipeline
from elche.schedule.planning.profile import (
    DeviceProfile,
    LayerProfile,
    LayerTimes,
    LinkProfile,
    PipelineProfile,
)

TORCH_CONTENDERS = ("torch-1f1b", "torch-interleaved-zb", "torch-zb-v")
BY_HAND = tuple(f"{name} by hand" for name in TORCH_CONTENDERS)
"""Torch's schedules on the best split of whole layers; the others' is equal."""
ELCHE = "elche"
CONTENDERS = (*TORCH_CONTENDERS, *BY_HAND, ELCHE)
_REFERENCE = "emulated"


@dataclass(frozen=True, kw_only=True)
class PipelineBenchConfig:
    """What is measured.

    Attributes:
        speeds: relative speeds of the emulated devices, two or more.
        microbatches: of one step, a multiple of the devices.
        layers: equal layers of the model, at least two for each device.
        ms_per_layer: forward of one layer on one microbatch on a device of speed 1;
            input gradient and weight gradient take as long each.
        link_ms: time of a message between devices that the plan reckons with.
        repetitions: measured steps of each contender, which take turns.
        schedule: of elche, a name or ``auto``.
        memory_layers: layers' activations of one microbatch that each device may
            hold in elche's plan; 0 for no limit. None takes as many as a device of an
            equal split holds in torch's schedules: those of all layers.

    Raises:
        ConfigError: a setting is wrong; says what to write instead.
    """

    speeds: tuple[float, ...]
    microbatches: int = 16
    layers: int = 24
    ms_per_layer: float = 4.0
    link_ms: float = 1.0
    repetitions: int = 5
    schedule: str = "auto"
    memory_layers: float | None = None

    def __post_init__(self) -> None:
        ranks = len(self.speeds)
        if ranks < 2:
            raise ConfigError(
                f"expected two --speeds or more, such as 1,1,1,0.33; got {ranks}"
            )
        for name in ("ms_per_layer", *(["link_ms"] if self.link_ms else [])):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"expected a positive {name}, got {value!r}")
        if not all(math.isfinite(speed) and speed > 0 for speed in self.speeds):
            raise ConfigError(f"expected positive --speeds, got {self.speeds}")
        if self.layers < 2 * ranks:
            raise ConfigError(
                f"expected at least {2 * ranks} --layers, two for each of {ranks} "
                f"devices, got {self.layers}"
            )
        if self.microbatches < ranks or self.microbatches % ranks:
            raise ConfigError(
                f"expected --microbatches to be a multiple of {ranks} devices, as "
                f"torch's interleaved schedule needs; got {self.microbatches}"
            )
        if self.repetitions < 1:
            raise ConfigError(
                f"expected --repetitions of at least 1, got {self.repetitions}"
            )
        if self.schedule not in (*FIXED_SCHEDULES, "auto"):
            raise ConfigError(
                f"expected --schedule among {', '.join(FIXED_SCHEDULES)} and auto, got "
                f"{self.schedule!r}"
            )
        memory = self.memory_layers
        if memory is not None and not (math.isfinite(memory) and memory >= 0):
            raise ConfigError(f"expected --memory-layers of at least 0, got {memory!r}")

    @property
    def num_ranks(self) -> int:
        """Devices, a process each."""
        return len(self.speeds)

    @property
    def memory_limit_layers(self) -> float:
        """Layers' activations that each device may hold in elche's plan."""
        if self.memory_layers is None:
            return float(self.layers)
        return self.memory_layers or math.inf

    def layer_s(self, rank: int) -> float:
        """Declared time of F, of I and of W of one layer on a device."""
        return self.ms_per_layer / 1e3 / self.speeds[rank]

    def equal_split(self, num_stages: int) -> tuple[int, ...]:
        """Layers of each of torch's stages."""
        each, rest = divmod(self.layers, num_stages)
        return tuple(each + (stage < rest) for stage in range(num_stages))

    def split_by_hand(self, placement: Sequence[int]) -> tuple[int, ...]:
        """Layers of each of torch's stages, each device's as its speed allows."""
        stages = Counter(placement)
        counts = whole_layer_counts(self, least=max(stages.values()))
        sizes = []
        for rank in placement:  # what a device has, in equal parts
            part = -(-counts[rank] // stages[rank])
            stages[rank] -= 1
            counts[rank] -= part
            sizes.append(part)
        return tuple(sizes)

    def to_json(self) -> str:
        """The settings as text."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> PipelineBenchConfig:
        """Reads what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return PipelineBenchConfig(**{**values, "speeds": tuple(values["speeds"])})


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Elche's plan and what it is held against.

    Attributes:
        schedule: its ranks are the devices; compute only.
        sizes: layers of each stage.
        costs: of the stages, in the schedule's placement.
        predicted_s: makespan.
        peak_layers: most layers' activations that each device holds.
        ideal_s: work over the sum of the speeds, as if layers could be cut anywhere.
        partition_ideal_s: likewise with whole layers: the busiest device's work in the
            best division, without a bubble.
    """

    schedule: Schedule
    sizes: tuple[int, ...]
    costs: PipelineCosts
    predicted_s: float
    peak_layers: tuple[float, ...]
    ideal_s: float
    partition_ideal_s: float


@cache
def make_bench_plan(config: PipelineBenchConfig) -> BenchPlan:
    """Plans for the declared times; every process finds the same plan.

    Raises:
        ConfigError: no plan fits the memory.
    """
    profile = bench_profile(config)
    asked = PlanConfig(
        num_microbatches=config.microbatches,
        schedule=config.schedule,
        use_all_devices=True,
    )
    chosen = plan_pipeline(profile, asked).chosen
    devices, ranks = chosen.partition.devices, chosen.partition.ranks
    timing = chosen.timing
    by_device = [ranks.index(device) for device in range(config.num_ranks)]
    limits = chosen.costs.memory
    return BenchPlan(
        schedule=Schedule(
            name=chosen.schedule.name,
            num_microbatches=config.microbatches,
            placement=devices,
            actions=tuple(chosen.schedule.actions[rank] for rank in by_device),
        ),
        sizes=chosen.partition.sizes,
        costs=replace(
            chosen.costs,
            placement=devices,
            memory=tuple(limits[rank] for rank in by_device) if limits else (),
        ),
        predicted_s=chosen.step_s,
        peak_layers=tuple(timing.peak_activations[rank] for rank in by_device),
        ideal_s=ideal_step_s(profile, config.microbatches),
        partition_ideal_s=whole_layer_ideal_s(config),
    )


def bench_profile(config: PipelineBenchConfig) -> PipelineProfile:
    """Layers and devices as declared; activations count in layers."""
    declared_s = config.ms_per_layer / 1e3
    times = LayerTimes(
        forward_s=declared_s,
        input_gradient_s=declared_s,
        weight_gradient_s=declared_s,
    )
    return PipelineProfile(
        layers=tuple(
            LayerProfile(
                name=f"layer {index}", times={_REFERENCE: times}, activation_bytes=1.0
            )
            for index in range(config.layers)
        ),
        devices=tuple(
            DeviceProfile(
                name=f"device {rank}",
                kind=_REFERENCE,
                speed=speed,
                memory_bytes=config.memory_limit_layers,
            )
            for rank, speed in enumerate(config.speeds)
        ),
        link=LinkProfile(latency_s=config.link_ms / 1e3),
    )


def whole_layer_counts(config: PipelineBenchConfig, least: int = 0) -> list[int]:
    """Layers of each device, so that the busiest one has as little work as can be.

    Equal layers go one by one to the device that would be done first, which is exact.
    """
    counts = [least] * config.num_ranks
    for _ in range(config.layers - sum(counts)):
        first = min(
            range(config.num_ranks),
            key=lambda rank: (counts[rank] + 1) * config.layer_s(rank),
        )
        counts[first] += 1
    return counts


def whole_layer_ideal_s(config: PipelineBenchConfig) -> float:
    """The busiest device's work where whole layers are divided as well as can be."""
    passes = 3 * config.microbatches
    return max(
        passes * count * config.layer_s(rank)
        for rank, count in enumerate(whole_layer_counts(config))
    )
