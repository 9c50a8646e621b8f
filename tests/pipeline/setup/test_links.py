"""Messages between ranks are timed before the first plan, and the plan counts them."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.transport.point_to_point import PointToPoint
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.links import links_of, measure_links
from elche.pipeline.setup.measured_plan import layer_costs_of, plan_measured
from elche.pipeline.setup.profiling import (
    LayerMeasurement,
    as_message,
    profile_layers,
)
from elche.runtime.process.environment import read_placement
from elche.schedule.costs import PipelineCosts
from elche.schedule.planning.profile import LinkProfile
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.setup.cases.profiling_cases import Clock, virtual_time

SLOW_S = 0.05
TIMEOUT_S = 60.0


def timed(by_memory: bool) -> list[list[float]]:
    """Links of three ranks, of which the last two are slow between each other."""
    peers = StagePeers.join(read_placement(), TIMEOUT_S)
    if not by_memory:
        peers.transport.connect({})
    send = PointToPoint.send

    def slow(self: PointToPoint, address: Any, *rest: Any) -> None:
        if {address.rank, self.rank} == {1, 2}:
            Clock.now_s += SLOW_S
        send(self, address, *rest)

    PointToPoint.send = slow  # type: ignore[method-assign]
    try:
        with virtual_time():
            found = measure_links(peers.transport, [0, 1, 2], 1 << 18, TIMEOUT_S)
        peers.exchange(None, TIMEOUT_S, "the others")
        ways = [incoming.descriptor for _, incoming in peers.transport.memory.values()]
        assert all(os.fstat(way).st_blocks * 512 <= 1 << 16 for way in ways)
        return found
    finally:
        PointToPoint.send = send  # type: ignore[method-assign]
        peers.close()


@pytest.mark.distributed
@pytest.mark.parametrize("by_memory", [True, False])
def test_each_pair_is_timed_by_its_first_rank(
    ranks3: RankPool, by_memory: bool
) -> None:
    told = ranks3.run(timed, by_memory, case_setup=serve_in_thread)
    assert [[row[:2] for row in rows] for rows in told] == [
        [[0, 1], [0, 2]],
        [[1, 2]],
        [],
    ]
    links = links_of(told)
    assert links[1, 2].latency_s == pytest.approx(SLOW_S / 2)  # by its clock alone
    assert [links[0, other].latency_s for other in (1, 2)] == [0.0, 0.0]


def measured(message_s: float = 0.0, output_bytes: int = 8) -> list[list[list[float]]]:
    one = LayerMeasurement(1.0, 1.0, 1.0, 2.0, 8, output_bytes, 8, message_s)
    return [as_message([one] * 4)] * 2


def planned(links: dict[tuple[int, int], LinkProfile], **one: Any) -> PipelineCosts:
    told = measured(**one)
    limits = [math.inf] * 2
    config = plan_measured(told, limits, "1f1b", 8, PipelineConfig(), links)[1]
    assert config.partition == (2, 2)
    assert isinstance(config.costs, PipelineCosts)
    return config.costs


def test_the_plan_counts_messages() -> None:
    link = LinkProfile(latency_s=0.5, bytes_per_s=100.0, efficiency=1.0)
    costs = planned({(0, 1): link}, output_bytes=50)
    assert costs.link(0) == 1.0
    assert [one.forward for one in costs.stages] == [2.0, 2.0]
    assert layer_costs_of(measured(output_bytes=50), (), {(0, 1): link}).link == 1.0
    assert layer_costs_of(measured()).link == 0.0


def test_a_message_keeps_both_of_its_ranks_busy() -> None:
    costs = planned({}, message_s=0.25)
    assert [one.forward for one in costs.stages] == [2.25, 2.25]
    assert [one.input_gradient for one in costs.stages] == [2.25, 2.25]
    assert [one.full_backward for one in costs.stages] == [4.25, 4.25]
    assert [one.weight_gradient for one in costs.stages] == [2.0, 2.0]


def test_a_larger_message_takes_longer() -> None:
    layers = nn.Sequential(nn.Identity(), nn.Linear(1 << 14, 1))
    large, small = profile_layers(layers, torch.randn(64, 1 << 14), torch.device("cpu"))
    assert large.message_s > small.message_s > 0.0
