"""Contenders of `benchmarks.hetero` beside those of the demo."""

from __future__ import annotations

import pytest

from benchmarks.hetero.contender import MODULE, BenchSpec
from benchmarks.hetero.order import sampler_of
from elche.demo.compare import Devices, run_contender
from elche.runtime.data.sample_order import GENERATORS_ONLY

DEVICES = Devices(speeds=(1.0, 0.5), ms_per_sample=0.5)


def test_one_part_is_in_the_order_of_several() -> None:
    whole, parts = sampler_of(96, 1, seed=3), sampler_of(96, 4, seed=3)
    assert list(whole) == [sample for _ in range(4) for sample in parts]
    assert type(whole) in GENERATORS_ONLY  # else a run ends with its first rank


@pytest.mark.distributed
def test_a_loop_of_the_trainer_is_a_contender() -> None:
    spec = BenchSpec(
        kind="elche",
        policy="delayed_sync",
        model="mlp",
        samples=128,
        optimizer="muon",
    )
    run = run_contender("elche-delayed_sync", spec, DEVICES, module=MODULE)
    assert [rank["samples"] for rank in run.ranks] == [128, 128]
    assert [point[1] for point in run.curve()] == [0, 128]
    assert run.curve(0)[1][2] == run.curve(1)[1][2]
    assert run.ranks[0]["windows"] == 4
    assert run.ranks[0]["nominal_s"] > 0.0
