"""The best partition for a schedule by name, against all that there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from elche.errors import ConfigError
from elche.schedule.generators.schedules import FIXED_SCHEDULES, LOOPED, V_SHAPED
from elche.schedule.planning.partition import Partition, ProfileTable
from elche.schedule.planning.partition_search import Evaluator, fits
from elche.schedule.planning.plan import PlanConfig
from elche.schedule.planning.planner import plan_pipeline
from elche.schedule.planning.profile import PipelineProfile
from tests.schedule.planning.test_partition import profiles


def every_partition(profile: PipelineProfile, name: str) -> Iterator[Partition]:
    """On every choice and order of devices; on two at least where stages interleave."""
    layers, devices = len(profile.layers), range(len(profile.devices))
    several = name in LOOPED + V_SHAPED
    for count in range(2 if several else 1, len(devices) + 1):
        for order in permutations(devices, count):
            held = (*order, *reversed(order)) if name in V_SHAPED else order
            held = order * 2 if name in LOOPED else held
            for cuts in combinations(range(1, layers), len(held) - 1):
                bounds = (0, *cuts, layers)
                yield Partition(held, tuple(b - a for a, b in pairwise(bounds)))


def best_of_all(
    profile: PipelineProfile, name: str, count: int
) -> tuple[float, float] | None:
    """Bytes that are lacking, and the step; None where there is no such schedule."""
    table = ProfileTable(profile, count)
    evaluator, found = Evaluator(table), []
    for each in every_partition(profile, name):
        if fits(table, each):
            with contextlib.suppress(ConfigError):
                found.append(evaluator.measure(name, each))
    return min(found, default=None)


def compare(profile: PipelineProfile, name: str, count: int) -> float:
    """The plan's step over the best of all; 1.0 where nothing fits for either."""
    best = best_of_all(profile, name, count)
    config = PlanConfig(num_microbatches=count, schedule=name)
    try:
        found = plan_pipeline(profile, config).chosen
    except ConfigError:
        assert best is None or best[0] > 0, "it is refused, and would fit"
        return 1.0
    assert best is not None
    assert best[0] == found.missing_bytes == 0
    return found.step_s / best[1] if best[1] else 1.0


@given(profiles(most_layers=6), st.integers(2, 6), st.sampled_from(FIXED_SCHEDULES))
@settings(max_examples=25)
def test_no_partition_is_better(
    profile: PipelineProfile, count: int, name: str
) -> None:
    assert compare(profile, name, count) <= 1 + 1e-8
