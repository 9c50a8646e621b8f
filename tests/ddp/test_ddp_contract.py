"""What `elche.DistributedDataParallel` promises beyond the gradients themselves."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from tests.ddp.cases import ddp_contract_cases as cases
from tests.ddp.cases import ddp_user_cases as users
from tests.ddp.cases.ddp_cases import meeting
from tests.ddp.test_ddp import same
from tests.harness.rank_pool import RankPool


def if_torch_has(argument: str) -> pytest.MarkDecorator:
    """Skips a case of an argument that this torch's own wrapper lacks (2.9)."""
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return pytest.mark.skipif(argument not in known, reason=f"torch has no {argument}")


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*broadcast_buffers.*:FutureWarning"),
]


def mean_of(locals_: list[dict[str, Any]], weights: list[float]) -> dict[str, Any]:
    total = sum(weights)
    return {
        name: sum(
            w / total * each[name] for w, each in zip(weights, locals_, strict=True)
        )
        for name in locals_[0]
    }


def test_no_sync_and_strategy_none_reduce_nothing(ranks2: RankPool) -> None:
    for how in ("no_sync", "none"):
        for found, own in ranks2.run(cases.unreduced, how, case_setup=meeting):
            same(found, own, 0.0)
    reduced = ranks2.run(cases.unreduced, "overlapped", case_setup=meeting)
    assert not torch.equal(reduced[0][0]["0.bias"], reduced[0][1]["0.bias"])


def test_buffers_are_rank_0s_as_in_torch(ranks2: RankPool) -> None:
    ours = ranks2.run(cases.buffers, "elche", case_setup=meeting)
    theirs = ranks2.run(cases.buffers, "torch", case_setup=meeting)
    for mine, first, other in zip(ours[1], ours[0], theirs[0], strict=True):
        assert torch.equal(mine, first)
        torch.testing.assert_close(first, other)


@pytest.mark.parametrize(
    ("options", "equal_at_start"),
    [
        ({"broadcast_buffers": False}, False),
        pytest.param(
            *({"forward_sync_buffers": False}, True),
            marks=if_torch_has("forward_sync_buffers"),
        ),
    ],
)
def test_buffers_may_stay_local(
    ranks2: RankPool, options: dict[str, bool], equal_at_start: bool
) -> None:
    first, second = ranks2.run(cases.buffers, "elche", **options, case_setup=meeting)
    assert torch.equal(first[0], second[0]) == equal_at_start
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[2], second[2])


def test_buffers_are_those_of_who_trained(ranks2: RankPool) -> None:
    (before, first), (_, second) = ranks2.run(
        cases.buffers_of_who_trained, case_setup=meeting
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, before)


def test_an_evaluation_on_one_rank_waits_for_nobody(ranks2: RankPool) -> None:
    assert all(ranks2.run(cases.evaluate_on_one_rank, case_setup=meeting))


def test_static_graph_allows_several_gradients(ranks2: RankPool) -> None:
    reference = cases.checkpointed_alone()
    for reentrant in (True, False):
        for found in ranks2.run(cases.checkpointed, reentrant, case_setup=meeting):
            for mine, other in zip(found, reference, strict=True):
                same(mine, other, 1e-13)


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("tokens", [30.0, 10.0]),
        ("zero", [0.0, 1.0]),
        ("samples", [4.0, 4.0]),
        ("ranks", [1.0, 1.0]),
        ("dim", [6.0, 6.0]),
    ],
)
def test_weights(ranks2: RankPool, case: str, weights: list[float]) -> None:
    ranks = ranks2.run(cases.weigh, case, case_setup=meeting)
    expected = mean_of([own for own, *_ in ranks], weights)
    for _, reduced, first, second in ranks:
        same(reduced, expected, 1e-13)
        assert list(first) == weights
        assert set(second) == {first[0] if case in ("ranks", "dim") else 4.0}


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("shape", r"MismatchError: .*parameter 2\.bias: rank 0 has \[3\] float64 "),
        ("frozen", r"0\.bias: rank 0 has \[16\] float64 trained, rank 1 .* frozen"),
        ("order", r"place 0: rank 0 has 0\.weight, rank 1 has 5\.weight"),
        ("plan", r"option bucket_cap_mb: rank 0 has 1\.0, rank 1 has 2\.0"),
        ("sparse", r"ConfigError: on rank 1: 0: sparse gradients cannot be reduced"),
        ("meta", r"ConfigError: on rank 1: 0\.weight is on the meta device"),
        ("codec", r"has no argument codec; compress gradients by register_comm_hook"),
        ("precision", r"has no argument mixed_precision; run the model under"),
        ("by place", r"has no argument param_to_hook_all_reduce; leave it out"),
        ("no name", r"TypeError: elche\.Dist\w+: got an unexpected .* 'find_unused'"),
        pytest.param(
            "only torch's", r"^made$", marks=if_torch_has("batched_grad_copy")
        ),
        ("cap", r"expected bucket_cap_mb of 0 or more, got -1\.0"),
        ("strategy", r"unknown strategy 'eager'; expected one of: overlapped"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(
    ranks2: RankPool, case: str, says: str
) -> None:
    for text in ranks2.run(cases.refused, case, case_setup=meeting):
        assert re.search(says, text), text


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("unfrozen", r"0\.weight was frozen when the model was wrapped"),
        ("twice summed", r"loss_reduction='sum' cannot add to gradients that were"),
        ("weight", r"expected a weight of at least 0, got -1\.0"),
        ("some weights", r"set_weight\(\) was called for some of the backward passes"),
        ("added to a sum", r"a pass of weight 3 after one of 4 under no_sync\(\) can"),
        ("static", r"the first backward pass, which must not be in no_sync\(\)"),
        ("two hooks", r"ConfigError: a communication hook was registered before"),
        ("elche's group", r"expected process_group to be a torch\.distributed process"),
        ("joined static", r"join_step\(\) does not know which parameters a static"),
    ],
)
def test_what_cannot_go_on_is_refused(ranks2: RankPool, case: str, says: str) -> None:
    for text in ranks2.run(cases.misused, case, case_setup=meeting):
        assert re.search(says, text), text


def test_a_deadline_names_who_did_not_come(ranks3: RankPool) -> None:
    first, second, third = ranks3.run(cases.late, "auto", case_setup=meeting)
    assert second == "away"
    for text in (first, third):
        assert text.startswith("DeadlineError: ")
        assert re.search(r"ranks that did not arrive: [02, ]*1\b", text)
        assert "a rank without a batch calls join_step()" in text


@pytest.mark.faults
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_rank_that_dies_is_seen_before_the_deadline(
    ranks2: RankPool, transport: str
) -> None:
    survivor, dead = ranks2.run(
        cases.killed, transport, case_setup=meeting, expect_failure=True
    )
    assert dead.error is not None
    assert dead.error.way == "died"
    assert survivor.error is None
    # Over gloo either the process or the connection is seen to end first.
    says = "rank 1 is gone" + ("|failed on rank 0" if transport == "gloo" else "")
    assert re.search(says, survivor.value)


@pytest.mark.parametrize(
    "case", ["retained", "two forwards", "twice", "penalty", "skipped", "inner"]
)
def test_forwards_and_backwards_out_of_step(ranks2: RankPool, case: str) -> None:
    expected = cases.several_backwards_alone(case)
    for found in ranks2.run(cases.several_backwards, case, case_setup=meeting):
        same(found, expected, 1e-12)


@pytest.mark.parametrize("divide", [True, False])
def test_uneven_loops_join(ranks2: RankPool, divide: bool) -> None:
    ranks = ranks2.run(cases.uneven_loops, divide, case_setup=meeting)
    expected = cases.uneven_loops_alone(divide)
    for state, _ in ranks:
        same(state, expected, 1e-12)
    assert ranks[1][1] == [(4.0, 4.0)] * 2 + [(0.0, 4.0)] * 2


def test_what_was_accumulated_counts_without_a_last_batch(ranks2: RankPool) -> None:
    expected = cases.several_backwards_alone("one")
    for found, weights in ranks2.run(cases.accumulate_then_join, case_setup=meeting):
        same(found, expected, 1e-13)
        assert weights == (4.0, 4.0)


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize(
    ("name", "bound"), [("allreduce_hook", 1e-6), ("bf16_compress_hook", 2e-2)]
)
def test_a_hook_of_the_users_reduces_weighted_gradients(
    ranks2: RankPool, name: str, bound: float, loss: str
) -> None:
    for by_hook, by_elche in ranks2.run(
        cases.by_a_hook, name, loss, case_setup=meeting
    ):
        same(by_hook, by_elche, bound)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "compiled"))
        for name in users.SCRIPTS
    ],
)
def test_it_ends_as_with_torchs_wrapper(ranks2: RankPool, script: str) -> None:
    for ours, theirs in ranks2.run(users.both, script, case_setup=meeting):
        assert ours
        same(ours, theirs, 1e-12)


def test_a_buffer_resized_on_one_rank_is_refused(ranks2: RankPool) -> None:
    for text in ranks2.run(users.caches_of_other_lengths, case_setup=meeting):
        assert text.startswith("the model has other buffers on rank 1 than on rank 0")
        assert "then the last backward pass was interrupted" in text


def test_a_copy_trains(ranks2: RankPool) -> None:
    for copied, first in ranks2.run(users.a_copy_trains, case_setup=meeting):
        same(copied, first, 0.0)
