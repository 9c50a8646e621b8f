"""Mistakes in what a pipeline is given: a clear error on every rank, nobody waits."""

from __future__ import annotations

import pytest

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_input_cases import MISTAKES, mistaken, shuffled

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

MESSAGES = {
    "other microbatches": "rank 1 has zb-h1 of 2 stages and 8 microbatches",
    "one layer less": "ranks disagree about the partition",
    "another layer": "the layers, at 1: rank 0 has 1 (Tanh), rank 1 has 1 (ReLU)",
    "a layer without sizes, on one rank": "layer 2 (LazyLinear) has parameters or",
    "a loss that is a class": "needs a loss function of (output, target) that returns",
    "weights of nothing": "weight_of gave -1 for the target of microbatch 0; expected",
    "an option that is none, on one rank": "unexpected keyword argument 'microbatches'",
    "a batch of nothing": "the batch has no samples; leave empty batches out",
    "a batch of text": "expected a tensor with samples along its first dimension",
    "a batch of another width": "shapes cannot be multiplied (2x3 and 6x6)",
    "another call": "rank 0: step, rank 1: evaluate",
    "a loss that is complex": "expected loss_fn to return a real number",
    "a loss without gradient": "depends on no parameter that requires a gradient",
    "a loss that fails": "takes 1 positional argument but 2 were given",
    "an input changed in place": "changes the stage's input (or a parameter) in place",
    "a sparse output": "layout torch.sparse_coo cannot travel between stages",
}
WHERE = {"a batch of another width": 0, "a sparse output": 0}
TOLD_BY_ONE = (
    "an option that is none, on one rank",
    *("a batch of another width", "a loss that fails"),
    "a loss that is complex",
    *("a loss without gradient", "an input changed in place", "a sparse output"),
)


@pytest.mark.parametrize("kind", MISTAKES)
def test_every_rank_is_told(ranks2: RankPool, kind: str) -> None:
    found = ranks2.run(mistaken, kind, case_setup=serve_in_thread)
    assert [MESSAGES[kind] in one for one in found] == [True, True], found
    for rank, told in enumerate(found):
        is_own = kind not in TOLD_BY_ONE or rank == WHERE.get(kind, 1)
        assert told.startswith("RemoteRankError") is not is_own, told


@pytest.mark.parametrize("kind", ["alike", "apart", "only what it reads"])
def test_loaders_that_shuffle_differently(ranks2: RankPool, kind: str) -> None:
    first, last = ranks2.run(shuffled, kind, case_setup=serve_in_thread)
    assert first == []
    if kind == "apart":
        assert len(last) == 2, "in the first steps, not for ever"
        assert "input and target may belong to different samples" in last[0]
    else:
        assert last == []
