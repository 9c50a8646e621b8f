"""How replicas share out ranks, steps and parameters."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.errors import ConfigError, MismatchError
from elche.pipeline.peers.communicator import common
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.replicas.replica_groups import (
    ReplicaGroups,
    ReplicaShares,
    group_ranks,
    read_shares,
)
from elche.pipeline.replicas.replica_units import (
    BUFFER,
    FROZEN,
    LEARNS,
    HeldLayer,
    check_equal,
    plan_units,
)
from elche.schedule.actions import loop_placement
from elche.schedule.costs import RankTimes, equal_costs
from elche.schedule.generators.schedules import make_schedule
from tests.harness.reached import reach

NUM_LAYERS = 6


def test_ranks_are_shared_out_in_order() -> None:
    groups = group_ranks(2, 3, 4)
    assert groups.ranks == ((0, 1), (2, 3))
    assert (groups.index, groups.members) == (1, (2, 3))
    given = group_ranks([[3], [1, 0, 2]], 2, 4)
    assert (given.index, given.members) == (1, (1, 0, 2))


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (3, "4 ranks cannot be divided evenly among 3"),
        (8, "4 ranks cannot be divided evenly among 8"),
        ([[0, 1], [2]], "each of the ranks 0 to 3 in one replica"),
        ([[0, 1], [1, 2, 3]], "each of the ranks 0 to 3 in one replica"),
        ([[0, 1, 2, 3, 4]], "each of the ranks 0 to 3 in one replica"),
    ],
)
def test_a_grouping_that_does_not_come_out(replicas: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        group_ranks(replicas, 0, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("replicas", [0, -1, True, "2"])
def test_replicas_that_are_no_number(replicas: object) -> None:
    with pytest.raises(ConfigError, match="expected replicas of at least 1"):
        PipelineConfig(replicas=replicas)  # type: ignore[arg-type]


def test_ranks_that_disagree_about_the_replicas() -> None:
    with pytest.raises(
        MismatchError,
        match=r"one assignment .* got \[\[\[0\], \[1\]\], \[\[0, 1\]\]\] by",
    ):
        common([[[0], [1]], [[0, 1]]], "assignment of ranks to replicas")


def test_a_schedule_runs_on_the_ranks_of_its_replica() -> None:
    times = RankTimes(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
    made = make_schedule("1f1b", equal_costs(times, loop_placement(2), 2), 4)
    placed = ReplicaGroups(((0, 3), (2, 1)), 1).placed(made)
    assert placed.placement == (2, 1)
    assert placed.actions == ((), made.actions[1], made.actions[0], ())


TWO = ReplicaGroups(((0, 1), (2,)), 2)


def test_shares_are_weighted_by_samples() -> None:
    told = [(6, None), (None, 6), (2, -1)]
    shares = read_shares(told, TWO, [4, 2], "mean", True)
    assert shares.sizes == ([2, 2, 1, 1], [1, 1])
    assert shares.mine == [1, 1]
    assert shares.weights(0, 8.0) == [2.0, 2.0, 1.0, 1.0]
    assert shares.loss([[1.0, 1.0, 3.0, 3.0], [2.0, 6.0]]) == pytest.approx(18 / 8)
    summed = read_shares(told, TWO, [4, 2], "sum", True)
    assert summed.weights(1, 8.0) == [8.0, 8.0]
    assert summed.loss([[1.0, 1.0, 3.0, 3.0], [2.0, 6.0]]) == 16.0


def test_fewer_samples_than_microbatches_are_microbatches_of_one() -> None:
    shares = read_shares([(3, None), (None, 3), (1, 1)], TWO, [4, 2], "mean", True)
    assert shares.sizes == ([1, 1, 1], [1])
    assert shares.loss([[1.0, 2.0, 3.0], [6.0]]) == pytest.approx(12 / 4)


def test_a_replica_without_a_batch_has_no_share() -> None:
    shares = read_shares(
        [(6, None), (None, 6), (None, None)], TWO, [4, 2], "mean", True
    )
    assert shares.sizes == ([2, 2, 1, 1], [])
    assert shares.loss([[1.0, 1.0, 3.0, 3.0], []]) == pytest.approx(10 / 6)
    empty = read_shares([(6, None), (None, 6), (0, 0)], TWO, [4, 2], "mean", True)
    assert empty.sizes == shares.sizes


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([(6, None), (None, 6), (None, 2)], "replica 1 has a target but no batch"),
        ([(6, None), (None, None), (2, 2)], "replica 0 has a batch but no target"),
        ([(6, None), (None, 6), (1, 2)], "the batch has 1 samples, but the target 2"),
        ([(None, None)] * 3, "no replica has a batch"),
    ],
)
def test_batches_that_do_not_go_together(
    told: list[tuple[int | None, int | None]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shares(told, TWO, [4, 2], "mean", True)


def test_losses_on_some_replicas_only() -> None:
    shares = ReplicaShares(([2], [2], []), 0, "mean")
    assert shares.loss([[], [], []]) is None
    with pytest.raises(ConfigError, match="replica 1 has a batch without a target"):
        shares.loss([[1.0], [], []])


def held(layers: list[int], stage: int, finished_at: int) -> list[HeldLayer]:
    """Layers with a weight of their own; the first and the last share one."""
    made = []
    for layer in layers:
        tied = layer in (0, NUM_LAYERS - 1)
        tensors = {
            f"{layer}.weight": f"{LEARNS} [2, 2] torch.float32",
            f"{layer}.frozen": f"{FROZEN} [2] torch.float32",
            "mean": f"{BUFFER} [2] torch.float32",
        }
        if tied:
            tensors["0.tied"] = f"{LEARNS} [2, 2] torch.float32"
        made.append(HeldLayer(layer, stage, finished_at, tensors))
    return made


@st.composite
def replicas(draw: st.DrawFn) -> list[list[list[HeldLayer]]]:
    """Of each replica, of each of its ranks, the layers."""
    found = []
    for _ in range(draw(st.integers(2, 3))):
        cuts = draw(st.sets(st.integers(1, NUM_LAYERS - 1), max_size=3))
        bounds = [0, *sorted(cuts), NUM_LAYERS]
        num_ranks = draw(st.integers(1, len(bounds) - 1))
        ranks: list[list[HeldLayer]] = [[] for _ in range(num_ranks)]
        for stage, (begin, end) in enumerate(pairwise(bounds)):
            finished_at = draw(st.integers(0, 5)) * 10 + stage
            layers = list(range(begin, end))
            ranks[stage % num_ranks] += held(layers, stage, finished_at)
        found.append(ranks)
    return found


@given(replicas())
def test_every_parameter_is_reduced_once_by_all_that_hold_it(
    drawn: list[list[list[HeldLayer]]],
) -> None:
    flat = [ranks for replica in drawn for ranks in replica]
    units = plan_units(flat)
    names = [name for unit in units for name in unit.names]
    assert len(names) == len(set(names))
    assert set(names) == {"0.tied", *(f"{i}.weight" for i in range(NUM_LAYERS))}
    for unit in units:
        for name in unit.names:
            holders = {
                rank: {layer.stage for layer in layers if name in layer.tensors}
                for rank, layers in enumerate(flat)
            }
            assert unit.ranks == tuple(r for r, stages in holders.items() if stages)
            for rank in unit.ranks:
                assert set(unit.stages_on(rank)) == holders[rank]
    assert len({(unit.ranks, unit.stages) for unit in units}) == len(units)


@pytest.mark.reaches("same ranks")
@given(replicas())
def test_units_are_reduced_in_the_order_in_which_they_are_complete(
    drawn: list[list[list[HeldLayer]]],
) -> None:
    flat = [ranks for replica in drawn for ranks in replica]
    finished_at = {
        (rank, layer.stage): layer.finished_at
        for rank, layers in enumerate(flat)
        for layer in layers
    }
    for a, b in pairwise(plan_units(flat)):
        if a.ranks == b.ranks:
            reach("same ranks")
            complete = [
                max(finished_at[one.ranks[0], stage] for stage in one.stages[0])
                for one in (a, b)
            ]
            assert complete == sorted(complete)


def test_differences_between_replicas_are_named() -> None:
    groups = ReplicaGroups(((0,), (1, 2)), 0)
    good = held([0, 1, 2], 0, 9)
    check_equal([good, good[:2], good[2:]], groups)
    with pytest.raises(MismatchError, match="replica 0 has 3 layers, replica 1 has 2"):
        check_equal([good, good[:2], []], groups)
    other = HeldLayer(2, 1, 0, good[1].tensors)
    with pytest.raises(
        MismatchError, match=r"layer 2: 1.frozen is not there on rank 0 of replica 0"
    ):
        check_equal([good, good[:2], [other]], groups)
