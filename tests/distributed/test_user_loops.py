"""What people do in their loops: right to rounding, or refused by name."""

from __future__ import annotations

import re

import pytest

from tests.distributed.cases.tasks import difference, identical
from tests.distributed.cases.user_loop_cases import SAMPLES, Job, alone, on_ranks
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "job",
    [
        Job("sync", "halved"),
        Job("gradients", "halved"),
        Job("sync", "halved for once"),
        Job("gradients", "halved for once"),
        Job("sync", "converted"),
        Job("gradients", model="channels last", optimizer="fused"),
        Job("sync", model="channels last", optimizer="fused"),
        Job("sync", model="channels last on one", optimizer="fused"),
        Job("gradients", "skipped"),
        Job("gradients", "broken off"),
        Job("gradients", model="reentrant"),
        Job("gradients", model="reentrant throughout"),
        Job("gradients", "broken off", model="reentrant"),
        Job("gradients", "broken off", model="reentrant throughout"),
        Job("sync", model="reentrant"),
        Job("sync", model="reentrant throughout", bucket_cap_mb=1e-5),
        Job("sync", model="omitting"),
        Job("sync", "looked at", model="omitting"),
        Job("sync", "looked at for once", model="omitting"),
        Job("gradients", model="omitting"),
        Job("gradients", "looked at", model="omitting"),
        Job("sync", model="shared"),
        Job("sync", model="shared", bucket_cap_mb=1e-5),
        Job("sync", model="shared, varying", bucket_cap_mb=1e-5),
        Job("sync", "fetched ahead", batch_size=5),
        Job("sync", "fetched ahead", model="reentrant", batch_size=5),
    ],
    ids=str,
)
def test_it_ends_as_in_one_process(ranks2: RankPool, job: Job) -> None:
    """Hooks of the user's own, memory formats, batches that nothing was learned of."""
    found = ranks2.serve(on_ranks, job)
    assert [each.error for each in found] == ["", ""]
    assert identical([each.state for each in found])
    bound = 1e-6 if job.loop == "converted" else 1e-13
    assert difference(found[0].state, alone(job).state) <= bound
    if job.policy == "sync" and job.loop != "converted":  # one reduction in a step
        steps = 2 * -(-SAMPLES // job.batch_size)
        assert [each.passes for each in found] == [steps] * 2
    if job.model == "channels last on one":
        kept = [each.state["1.weight"].is_contiguous() for each in found]
        assert kept == [True, False]


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Job("gradients", "scaler"), r"a GradScaler cannot step where gradients are"),
        (
            Job("gradients", "two optimizers", optimizer="body"),
            r"a second optimizer \(SGD\) steps 2 of the model's parameters",
        ),
        (
            Job("sync", "stepped in backward"),
            r"optimizer\.step\(\) inside a backward pass",
        ),
        (
            Job("gradients", "stepped in backward", optimizer="body"),
            r"a second optimizer \(SGD\) steps 1 of the model's parameters",
        ),
        (
            Job("gradients", "stepped in backward"),
            r"optimizer\.step\(\) inside a backward pass",
        ),
        (
            Job("sync", "converted inside"),
            r"\.(weight|bias): expected a gradient of torch.float64, as its parameter",
        ),
        (
            Job("sync", model="shared later", bucket_cap_mb=1e-5),
            r"layer\.0\.\w+ got 2 gradients in this backward pass but at most",
        ),
        (
            Job("sync", "losses summed"),
            r"one backward pass goes through the forward passes of batches 2 and 3",
        ),
        (
            Job("sync", "fetched ahead", model="called otherwise"),
            r"elche cannot tell to which batch this pass",
        ),
        *(
            (Job(policy, loop), says)
            for policy in ("cadence", "async")
            for loop, says in (
                (
                    "converted inside",
                    r"layout of 0\.weight has .* \[16, 6\] float32 on",
                ),
                ("converted", r"0\.weight .* float32 on cpu, which changes its messag"),
            )
        ),
    ],
    ids=str,
)
def test_what_would_go_wrong_unseen_is_refused(
    ranks2: RankPool, job: Job, says: str
) -> None:
    for each in ranks2.serve(on_ranks, job):
        assert re.search(says, each.error), each.error


@pytest.mark.parametrize(
    "job",
    [
        # A window waits for one backward pass of four batches, and ends after it.
        Job("cadence", "losses summed"),
        Job("async", "losses summed"),
        Job("cadence", model="channels last on one"),
        Job("cadence", "new strides"),
        Job("async", "new strides"),
    ],
    ids=str,
)
def test_ranks_end_equal_in_windows(ranks2: RankPool, job: Job) -> None:
    found = ranks2.serve(on_ranks, job)
    assert [each.error for each in found] == ["", ""]
    assert identical([each.state for each in found])
    assert all(each.steps for each in found)


@pytest.mark.parametrize("policy", ["cadence, planned", "async, planned"])
def test_new_memory_is_averaged_like_the_old(ranks2: RankPool, policy: str) -> None:
    """Nothing holds on to where parameters were: ``p.data = ...`` may be assigned."""
    loops = "plain", "new memory"
    found = [
        rank for loop in loops for rank in ranks2.serve(on_ranks, Job(policy, loop))
    ]
    assert [each.error for each in found] == [""] * 4
    assert identical([each.state for each in found])
