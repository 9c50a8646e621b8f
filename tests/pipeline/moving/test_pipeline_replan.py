"""Plans follow drifting times; waits have deadlines from the plan."""

from __future__ import annotations

import re

import pytest

from elche.runtime.process.coordinator import serve_in_thread
from tests.harness.rank_pool import RankPool
from tests.pipeline.cases.pipeline_cases import furthest
from tests.pipeline.cases.pipeline_replan_cases import (
    DRIFT_STEP,
    Drifted,
    DriftWork,
    drifted,
    stalled,
    throttled,
)

pytestmark = pytest.mark.distributed


def _drifted(pool: RankPool, given: DriftWork) -> list[Drifted]:
    found: list[Drifted] = pool.run(drifted, given, case_setup=serve_in_thread)
    for one in found:
        assert one.plans == found[0].plans, "all ranks run the same plan at every step"
        assert one.partitions == found[0].partitions
    return found


def test_jitter_changes_no_plan(ranks4: RankPool) -> None:
    found = _drifted(ranks4, DriftWork())[0]
    assert len(set(found.plans)) == 1
    assert found.log == []


def test_a_slower_stage_gets_another_schedule(ranks4: RankPool) -> None:
    still = _drifted(ranks4, DriftWork())[0]
    found = _drifted(ranks4, DriftWork(slow_stages=(0,), factor=3.0))[0]
    assert found.plans[:DRIFT_STEP] == still.plans[:DRIFT_STEP]
    assert found.plans[-1] != still.plans[-1]
    assert len(set(found.plans)) == 2, "once, and then it stays"
    assert found.partitions == still.partitions
    (told,) = (line for line in found.log if "re-planned" in line)
    makespans = [float(one) for one in re.findall(r"([\d.]+) s\b", told)]
    assert len(makespans) == 2
    assert makespans[1] < makespans[0]
    assert furthest(found.state, still.state) <= 1e-12


def test_a_schedule_by_name_stays_and_a_better_partition_is_told(
    ranks2: RankPool,
) -> None:
    given = DriftWork("1f1b", slow_rank=1, factor=3.0)
    first, second = _drifted(ranks2, given)
    assert len(set(first.plans)) == 1
    assert set(first.partitions) == {(4, 4)}
    assert any("pipe.repartition([6, 2], optimizer=" in line for line in first.log)
    assert second.log == [], "one rank says it"


def test_layers_move_by_themselves_where_they_may(ranks2: RankPool) -> None:
    still = _drifted(ranks2, DriftWork("1f1b"))[0]
    given = DriftWork(
        "1f1b",
        slow_rank=1,
        factor=3.0,
        options=(("auto_repartition", True),),
        registers=True,
    )
    found = _drifted(ranks2, given)[0]
    assert found.partitions[DRIFT_STEP] == (4, 4)
    assert found.partitions[-1] == (6, 2)
    assert len(set(found.partitions)) == 2
    assert furthest(found.state, still.state) <= 1e-12


def test_layers_stay_where_moving_them_costs_more_than_it_brings(
    ranks2: RankPool,
) -> None:
    given = DriftWork(
        "1f1b",
        slow_rank=1,
        factor=3.0,
        options=(("auto_repartition", True),),
        registers=True,
        payback_steps=0,
    )
    for one in _drifted(ranks2, given):
        assert set(one.partitions) == {(4, 4)}
        assert sum("layers stay where they are" in line for line in one.log) == 1


def test_a_replica_moves_its_layers_and_the_other_keeps_its_own(
    ranks4: RankPool,
) -> None:
    options = (("replicas", 2), ("auto_repartition", True))
    given = DriftWork("1f1b", slow_rank=3, factor=3.0, options=options, registers=True)
    found: list[Drifted] = ranks4.run(drifted, given, case_setup=serve_in_thread)
    for one, other in ((0, 1), (2, 3)):
        assert found[one].partitions == found[other].partitions
    assert set(found[0].partitions) == {(4, 4)}
    assert found[2].partitions[-1] == (6, 2)
    for name in found[0].state:
        mine = found[0].state[name]
        theirs = {**found[2].state, **found[3].state}[name]
        assert (mine - theirs).norm() <= 1e-12 * mine.norm()


def test_a_replica_changes_its_schedule_and_the_other_keeps_its_own(
    ranks4: RankPool,
) -> None:
    options = (("replicas", [[0, 1, 2], [3]]),)
    given = DriftWork(slow_stages=(4,), factor=3.0, options=options)
    found: list[Drifted] = ranks4.run(drifted, given, case_setup=serve_in_thread)
    assert found[0].plans == found[1].plans == found[2].plans
    assert len(set(found[0].plans)) == 2
    assert len(set(found[3].plans)) == 1
    held = {name: one for rank in found[:3] for name, one in rank.state.items()}
    whole = found[3].state
    assert held.keys() == whole.keys()
    assert furthest({name: held[name] for name in whole}, whole) <= 1e-12


def test_nothing_is_looked_at_where_that_is_not_wanted(ranks2: RankPool) -> None:
    given = DriftWork(slow_rank=1, factor=9.0, options=(("replan_every", 0),))
    found = _drifted(ranks2, given)[0]
    assert len(set(found.plans)) == 1
    assert found.log == []


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_throttled_device_gets_fewer_layers(
    ranks2: RankPool, by_itself: bool
) -> None:
    found = ranks2.run(throttled, by_itself, case_setup=serve_in_thread)
    (_, partitions, _), (counts, others, _) = found
    assert partitions == others
    before, after = counts
    assert after < before, f"{counts} layers on the throttled rank"
    assert all(learns for *_, learns in found)


@pytest.mark.faults
def test_a_stalled_rank_is_named_before_the_timeout(ranks4: RankPool) -> None:
    found = ranks4.run(stalled, 2, 5, case_setup=serve_in_thread)
    for rank in (0, 1, 3):
        count, told = found[rank]
        assert "rank 2 is late, and waits for nobody" in told, told
        waited = re.search(r"waited ([\d.]+) s for rank", told)
        assert waited is not None
        assert float(waited[1]) < 1000, "timeout_s is not what it waited for"
        assert count == 5, "steps before it were well"
    assert found[2][1] != "", "it learns that the others have ended"
