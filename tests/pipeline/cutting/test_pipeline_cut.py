"""Plain modules, cut by elche, train on real processes as one process does."""

from __future__ import annotations

import pytest

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import furthest
from tests.pipeline.cases.pipeline_cut_cases import Cut, Together, alone, together

pytestmark = pytest.mark.distributed


def check(pool: RankPool | None, work: Cut, micro_batches: int = 4) -> Together:
    """Losses, parameters and an evaluation of one sample are those of one process."""
    expected = alone(work, micro_batches)
    if pool is None:
        found = [together(work, micro_batches)]
    else:
        found = pool.run(together, work, micro_batches, case_setup=serve_in_thread)
    for one in found:
        assert one.trained.losses == pytest.approx(expected.losses, rel=1e-12)
        assert one.trained.evaluated == pytest.approx(expected.evaluated, rel=1e-12)
        assert one.trained.state.keys() == expected.state.keys()
        state = {name: one.trained.state[name] for name in expected.state}
        assert furthest(state, expected.state) <= 1e-12
        assert one.again
    return found[0]


@pytest.mark.parametrize(("model", "by_name"), [("gpt", True), ("resnet", False)])
def test_in_one_process(model: str, by_name: bool) -> None:
    options = {"stages_per_rank": 4}
    check(None, Cut(model, by_name, "interleaved-zb", options=options))


@pytest.mark.parametrize(
    ("model", "by_name"),
    [("crossing", True), ("gpt", False), ("resnet", True), ("routed", False)],
)
def test_on_two_ranks(ranks2: RankPool, model: str, by_name: bool) -> None:
    check(ranks2, Cut(model, by_name, "zb-v"))


def test_on_four_ranks(ranks4: RankPool) -> None:
    check(ranks4, Cut("gpt", schedule="auto"))


def test_a_mask_beside_the_batch(ranks2: RankPool) -> None:
    check(ranks2, Cut("gpt", schedule="zb-h1", masked=True))


def test_a_model_without_values(ranks2: RankPool) -> None:
    options = {"init": bool}  # its values are loaded
    check(ranks2, Cut("gpt", schedule="zb-h1", on_meta=True, options=options))


def test_replicas_of_a_model_that_was_cut(ranks4: RankPool) -> None:
    work = Cut("gpt", sizes=(6, 3, 1), options={"replicas": 2})
    # Both replicas have the same batches, so the mean is that of one of them.
    expected = alone(work, 4)
    for one in ranks4.run(together, work, 4, case_setup=serve_in_thread):
        assert one.trained.losses == pytest.approx(expected.losses, rel=1e-12)
        assert one.trained.evaluated == pytest.approx(expected.evaluated, rel=1e-12)
