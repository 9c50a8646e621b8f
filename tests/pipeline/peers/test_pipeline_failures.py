"""Bad input and failing ranks: a clear error on every rank, nobody left waiting."""

from __future__ import annotations

import pytest

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import constructed_again, stopped, troubled

pytestmark = [pytest.mark.distributed, pytest.mark.faults]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no batch", "ConfigError: step needs a batch on rank 0"),
        ("no target", "ConfigError: step needs a target on rank 1"),
    ],
)
def test_bad_batches_are_told_everywhere(
    ranks2: RankPool, kind: str, message: str
) -> None:
    for bad, good in ranks2.run(troubled, kind, case_setup=serve_in_thread):
        assert bad.startswith(message)
        assert good == ""


@pytest.mark.parametrize(
    ("kind", "own", "where", "all_told"),
    [
        ("raises", "ValueError", 2, "a layer's own trouble"),
        ("object", "ConfigError", 2, "stage 2 holds a object, which stages cannot"),
        ("no tensor", "ConfigError", 2, "the output of stage 2 holds no tensor"),
    ],
)
@pytest.mark.parametrize("schedule", ["zb-h1", "gpipe"])
def test_a_failing_stage_is_told_everywhere(
    ranks4: RankPool, kind: str, own: str, where: int, all_told: str, schedule: str
) -> None:
    found = ranks4.run(troubled, kind, schedule, case_setup=serve_in_thread)
    for rank, (bad, good) in enumerate(found):
        expected = own if rank == where else f"RemoteRankError: rank {where} failed"
        assert bad.startswith(expected)
        assert all_told in bad
        assert good.startswith("CommunicationError: the pipeline has ended (")


def test_a_pipeline_after_two_that_could_not_be_made(ranks2: RankPool) -> None:
    for *failed, works in ranks2.run(constructed_again, case_setup=serve_in_thread):
        assert all("expected a schedule among" in one for one in failed), failed
        assert works == ""


def test_a_loss_that_is_no_scalar(ranks2: RankPool) -> None:
    first, last = ranks2.run(troubled, "vector loss", case_setup=serve_in_thread)
    assert last[0].startswith("ConfigError: expected loss_fn to return a scalar")
    assert first[0].startswith("RemoteRankError: rank 1 failed: ConfigError: expected")


def test_a_hanging_rank_is_named(ranks4: RankPool) -> None:
    found = ranks4.run(troubled, "hangs", case_setup=serve_in_thread)
    for rank in (0, 1, 3):
        assert "rank 2 is late" in found[rank][0], found[rank][0]
    assert found[2][0] != ""


@pytest.mark.parametrize("late", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_between_steps_is_named(
    ranks3: RankPool, late: int
) -> None:
    """By those that wait for it; the others wait for them. It then goes on."""
    found = ranks3.run(stopped, late, case_setup=serve_in_thread)
    naming = {1, 2} if late == 0 else {0}
    for rank, (told, _) in enumerate(found):
        for line in told:
            assert f"for rank {late}: the begin of step; that rank is late" in line
        assert len(told) <= 1
        assert rank in naming or not told
    assert any(told for told, _ in found)
    assert len({loss for _, loss in found}) == 1


def test_a_dead_rank_is_named(ranks4: RankPool) -> None:
    outcomes = ranks4.run(
        troubled, "dies", case_setup=serve_in_thread, expect_failure=True
    )
    assert outcomes[2].error is not None
    assert "exit code 7" in outcomes[2].error.text
    for rank in (0, 1, 3):
        assert outcomes[rank].error is None
        told = outcomes[rank].value[0]
        assert "rank 2" in told
        assert "to join" not in told
