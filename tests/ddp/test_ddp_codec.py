"""`elche.DistributedDataParallel` whose gradients travel encoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elche.ddp.options import DdpOptions
from elche.errors import ConfigError
from tests.ddp.cases import ddp_codec_cases as cases
from tests.ddp.cases.ddp_cases import Plan, alone, meeting, train
from tests.ddp.test_ddp import equal_bits
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

SIZES = ((6, 6), (9, 3), (4, 0), (2, 10), (7, 5))
OFF = {"bf16": 0.02, "int8": 0.03, "int4": 0.3}
"""Of the largest element of any gradient."""


def apart(found: dict[str, Any], known: dict[str, Any]) -> float:
    """The largest difference, relative to the largest element."""
    pairs = [(found[name], each) for name, each in known.items() if each is not None]
    largest = max(float(each.abs().max()) for _, each in pairs)
    return max(float((one - each).abs().max()) for one, each in pairs) / largest


@pytest.mark.parametrize("codec", OFF)
@pytest.mark.parametrize("model", ["deep", "branches"])
def test_gradients_are_those_of_one_process_within_the_rounding(
    ranks2: RankPool, codec: str, model: str
) -> None:
    """Unequal batches, a rank without one, micro-batches, parameters not used."""
    branches = tuple((step % 2, 1) for step in range(len(SIZES)))
    plan = Plan(
        sizes=SIZES,
        model=model,
        dtype="float32",
        branches=branches if model == "branches" else (),
        micro=2,
        options={"codec": codec, "bucket_cap_mb": 0.0005},
    )
    traces = ranks2.run(train, plan, case_setup=meeting)
    equal_bits(traces)
    reference = alone(plan)
    first = apart(traces[0].gradients[0], reference.gradients[0])
    assert 0.0 < first <= OFF[codec]
    moved = apart(traces[0].state, reference.state)
    assert 0.0 < moved <= 2 * OFF[codec]


def test_of_sums_and_three_ranks(ranks3: RankPool) -> None:
    plan = Plan(
        sizes=((4, 2, 3), (1, 0, 5)),
        dtype="float32",
        loss="sum",
        options={"codec": "int8", "loss_reduction": "sum"},
    )
    traces = ranks3.run(train, plan, case_setup=meeting)
    equal_bits(traces)
    assert 0.0 < apart(traces[0].gradients[0], alone(plan).gradients[0]) <= 0.03


def test_what_is_not_finite_is_so_everywhere_and_then_forgotten(
    ranks2: RankPool,
) -> None:
    """A scaler skips the step on both ranks, and the next one is like any other."""
    first, second = ranks2.run(cases.with_a_scaler, "int8", case_setup=meeting)
    assert first.scales == second.scales == [8.0, 4.0, 4.0]
    for one, other in zip(first.states, second.states, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())
    assert torch.equal(first.states[1], first.states[0])  # skipped
    assert not torch.equal(first.states[2], first.states[1])


def test_another_group_begins_anew(ranks2: RankPool) -> None:
    for before, after in ranks2.run(cases.in_another_group, case_setup=meeting):
        assert before > 0.0
        assert after == 0.0


@pytest.mark.slow
@pytest.mark.faults
def test_a_rank_that_dies_is_seen_before_the_deadline(ranks2: RankPool) -> None:
    survivor, dead = ranks2.run(cases.killed, case_setup=meeting, expect_failure=True)
    assert dead.error is not None
    assert dead.error.way == "died"
    assert survivor.error is None
    assert "ranks that did not arrive: 1" in survivor.value


def test_ranks_of_other_codecs_are_refused(ranks2: RankPool) -> None:
    for told in ranks2.run(cases.disagreeing, case_setup=meeting):
        assert "codec" in told
        assert "'int8'" in told
        assert "'int4'" in told


def test_unknown_codecs_are_refused() -> None:
    settings: dict[str, Any] = {
        "broadcast_buffers": True,
        "bucket_cap_mb": None,
        "find_unused_parameters": False,
        "static_graph": False,
        "loss_reduction": "mean",
        "weight_by": "samples",
        "strategy": "overlapped",
        "transport": "auto",
    }
    with pytest.raises(ConfigError, match="codec to be one of fp32, bf16, int8, int4"):
        DdpOptions(**settings, codec="auto")  # type: ignore[arg-type]
