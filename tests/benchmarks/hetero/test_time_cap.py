"""Ranks leave a run of capped time together, whatever their clocks say."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hetero.contender import BenchSpec
from benchmarks.hetero.time_cap import TimeCap
from tests.benchmarks.hetero.capped_cases import train_capped
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

SPEC = BenchSpec(kind="elche", model="mlp", samples=96 * 32, out="", max_seconds=0.59)


def refuse() -> None:
    raise AssertionError("nobody is to be waited for")


def test_no_limit_and_nobody_else_to_ask(tmp_path: Path) -> None:
    endless = TimeCap(None, tmp_path / "word", refuse)
    assert not endless.leaves_after(1, 1e9)
    assert not endless.is_over(1e9)
    alone = TimeCap(2.0, None, refuse)
    assert [alone.leaves_after(1, at) for at in (1.9, 2.0)] == [False, True]
    assert [alone.is_over(at) for at in (1.9, 2.0)] == [False, True]
    assert list(tmp_path.iterdir()) == []


@given(
    seconds=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4),
    orders=st.lists(st.permutations(range(4)), min_size=4, max_size=4),
)
def test_ranks_in_step_leave_after_the_same_batch(
    seconds: list[float], orders: list[list[int]]
) -> None:
    """A rank ends a step only when all have begun it; within one, in any order."""
    with tempfile.TemporaryDirectory() as folder:
        caps = [TimeCap(5.0, Path(folder) / "word", refuse) for _ in seconds]
        last: dict[int, int] = {}
        batch = 0
        while len(last) < len(caps):
            batch += 1
            assert not last, "a rank has left, and the others wait for it"
            for rank in orders[batch % len(orders)]:
                if rank < len(caps) and caps[rank].leaves_after(
                    batch, batch * seconds[rank]
                ):
                    last[rank] = batch
        first_up = next(n for n in range(1, 99) if n * max(seconds) >= 5.0)
        assert set(last.values()) == {first_up + 1}


def test_after_a_part_all_stop_if_the_time_of_one_is_up(tmp_path: Path) -> None:
    met: list[str] = []
    late = TimeCap(5.0, tmp_path / "word", lambda: met.append("late"))
    early = TimeCap(5.0, tmp_path / "word", lambda: met.append("early"))
    assert not early.is_over(4.9)
    assert late.is_over(5.0)
    assert early.is_over(4.9)
    assert met == ["early", "late", "early"]
    assert [path.name for path in tmp_path.iterdir()] == ["word"]


@pytest.mark.distributed
@pytest.mark.parametrize(("segments", "batches"), [(1, 11), (48, 8)])
def test_sync_leaves_after_the_same_step_on_every_rank(
    ranks2: RankPool, tmp_path: Path, segments: int, batches: int
) -> None:
    """The quicker clock counts 0.06 s a batch, and 0.03 a part: it decides.

    Its time is up after 10 batches; in parts of two batches with the fourth part, when
    the batch that it names belongs to a part that nobody begins.
    """
    spec = replace(SPEC, out=str(tmp_path), segments=segments)
    results = ranks2.run(train_capped, spec, case_setup=serve_in_thread)
    assert [result["samples"] for result in results] == [batches * 32] * 2


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_windows_end_for_all_when_one_rank_leaves(
    ranks2: RankPool, tmp_path: Path, policy: str
) -> None:
    spec = replace(SPEC, out=str(tmp_path), policy=policy, segments=2)
    results = ranks2.run(train_capped, spec, case_setup=serve_in_thread)
    assert len({result["samples"] for result in results}) == 1
    assert 0 < results[0]["samples"] < SPEC.samples
