"""Manual control between processes, against one process on the union batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.by_hand.cases import replica_cases as cases
from tests.distributed.cases.tasks import identical
from tests.harness.printing import ended
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

SCRIPT = str(Path(__file__).parent / "cases" / "replica_scripts.py")
slow = partial(pytest.param, marks=pytest.mark.slow)
ELCHE = "-m", "elche", "run", "--nproc", "2"


@pytest.mark.parametrize("counts", [(5, 3), (7, 1), (4, 3, 1)], ids=str)
def test_two_models_train_as_in_one_process(
    ranks2: RankPool, ranks3: RankPool, counts: tuple[int, ...]
) -> None:
    pool = ranks2 if len(counts) == 2 else ranks3
    states = pool.serve(cases.gan_on_this_rank, counts, 10)
    whole = cases.gan(0, counts, 10, replicated=False)
    assert identical(states)
    for name, value in whole.items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float32", "complex128"])
@pytest.mark.every(3)
def test_means(ranks3: RankPool, dtype: str, transport: str) -> None:
    found = ranks3.serve(cases.plain_and_weighted_means, dtype, transport)
    # Gradients are rank + 1: (1 + 2 + 3) / 3, then (3 * 1 + 1 * 2) / 4 twice; only
    # rank 0 has gradients of "sometimes": 1 / 3, then 3 / 4.
    for states in found:
        for state, mean, part in zip(
            states, (2.0, 1.25, 1.25), (1 / 3, 0.75, 0.75), strict=True
        ):
            kind = getattr(torch, dtype)
            for name, value in (("0.weight", mean), ("sometimes.bias", part)):
                expected = torch.full_like(state[name], value, dtype=kind)
                torch.testing.assert_close(state[name], expected)
            assert state["unused.weight"].numel() == 0
    assert all(identical([states[call] for states in found]) for call in range(3))


def test_buffers(ranks3: RankPool) -> None:
    found = ranks3.serve(cases.sync_all_buffers)
    first = cases.state_of(cases.WithBuffers(0))
    for wrapped, averaged, copied in found:
        assert identical([wrapped, first])
        assert identical([copied, first])
        assert averaged["0.mean"].tolist() == [1.0] * 3
        assert averaged["0.fine"].flatten().tolist() == [1.5] * 4
        assert averaged["0.mask"].tolist() == [0.0, float("-inf")]
        assert int(averaged["0.count"]) == 10
        assert averaged["0.flags"].tolist() == [True, True]


def test_models_that_grow_and_freeze(ranks2: RankPool) -> None:
    found = ranks2.serve(cases.grow_and_freeze)
    for stages in zip(*found, strict=True):
        assert identical(list(stages))
    before, replaced, grown, frozen = found[0]
    assert (len(before), len(replaced)) == (2, 2)
    assert not torch.equal(replaced["0.0.weight"], before["0.0.weight"])
    assert len(grown) == 4
    assert torch.equal(frozen["0.0.weight"], grown["0.0.weight"])
    assert not torch.equal(frozen["0.1.weight"], grown["0.1.weight"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("settings", "config.timeout_s: rank 0 has 60.0, rank 1 has 61.0"),
        ("shape", "0.weight: rank 0 has [4, 3] float64 trained, rank 2 has [5"),
        ("frozen", "float64 trained, rank 2 has [4] float64 frozen"),
        ("converted buffer", "mean: rank 0 has [4] float32, rank 2 has [4] float64"),
        ("order", "all_reduce_gradients of 'one', rank 2 calls all_reduce_gradients"),
        ("call", "sync_params of 'one', rank 2 calls sync_buffers('mean') of 'one'"),
        ("counts", "rank 0 gives the counts ["),
        ("no sum", "1.7e+308], whose sum is inf"),
        ("own zero", "expected a count above 0 on at least one rank, got [0.0, 0.0"),
        ("values", "one: ranks hold different values in 2.bias; take the same"),
        ("second name", "RuntimeError: passed"),
    ],
)
def test_mistakes_are_named_on_every_rank(
    ranks3: RankPool, wrong: str, says: str
) -> None:
    said = ranks3.serve(cases.said_by, wrong)
    assert all(says in text for text in said), said
    assert len(set(said)) == 1


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("raise", "rank 1 failed: ValueError: a fault in user code"),
        slow("kill", "rank 1 is gone: its connection ended"),
        slow("leave", "check_equal of 'model'"),
        slow("quit", "all_reduce_gradients of 'model' failed on rank 0"),
    ],
)
def test_a_rank_that_ends_early_ends_the_others(case: str, says: str) -> None:
    done = ended(*ELCHE, SCRIPT, case)
    assert done.returncode != 0
    assert says in done.stderr, done.stderr
    assert "done" not in done.stdout
