"""`elche.DistributedDataParallel` with BatchNorm over the union batch of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ddp.cases.ddp_cases import Plan, Trace, alone, build, gradients_of, meeting
from tests.ddp.cases.ddp_norm_cases import refusals, train_norms
from tests.ddp.test_ddp import THREE, TWO, Gradients, equal_bits
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

EXACT = 1e-12


def check(traces: list[Trace], reference: Trace) -> None:
    """Of all together: a bias before a normalisation has no gradient but rounding."""
    equal_bits(traces)
    for ours, theirs in zip(traces[0].gradients, reference.gradients, strict=True):
        assert distance(ours, theirs) <= EXACT
    assert distance(dict(traces[0].state), dict(reference.state)) <= EXACT


def distance(ours: Gradients, theirs: Gradients) -> float:
    """Relative L2 difference."""
    assert ours.keys() == theirs.keys()
    one, other = (
        torch.cat([t.double().flatten() for t in each.values() if t is not None])
        for each in (ours, theirs)
    )
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("mean", {"transport": "auto", "bucket_cap_mb": 1e-4}),
        ("mean", {"transport": "gloo", "bucket_cap_mb": 1e-4}),
        ("mean", {"strategy": "synchronous", "gradient_as_bucket_view": True}),
        ("sum", {"transport": "gloo", "find_unused_parameters": True}),
    ],
)
def test_unequal_batches_equal_one_process(
    ranks2: RankPool, ranks3: RankPool, loss: str, options: dict[str, Any]
) -> None:
    options = {"loss_reduction": loss, **options}
    for ranks, sizes in ((ranks2, TWO), (ranks3, THREE)):
        plan = Plan(sizes, model="cnn", loss=loss, options=options)
        ends = ranks.run(train_norms, plan, case_setup=meeting)
        check([trace for trace, _ in ends], alone(plan))
        shares = options.get("transport", "auto") == "auto"
        assert [met for _, met in ends] == [{shares}] * len(ends)


def test_weights_that_are_set_weigh_in_the_layers_too(ranks2: RankPool) -> None:
    """Rank 0's samples count double; in the last step rank 1 has none."""
    sizes, tokens = ((5, 3), (4, 4), (6, 0)), ((10, 3), (8, 4), (12, 0))
    plan = Plan(sizes, model="cnn", tokens=tokens)
    traces = [trace for trace, _ in ranks2.run(train_norms, plan, case_setup=meeting)]
    model, reference = build("cnn"), Trace()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (mine, _) in enumerate(sizes):
        x, y = plan.batch(step)
        losses = F.cross_entropy(model(x), y, reduction="none")
        weights = torch.ones(len(x), dtype=torch.float64)
        weights[:mine] = 2.0
        ((losses * weights).sum() / weights.sum()).backward()
        reference.gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    reference.state = {k: v.clone() for k, v in model.state_dict().items()}
    check(traces, reference)


def test_what_cannot_work_is_refused_by_name(ranks2: RankPool) -> None:
    for said in ranks2.run(refusals, case_setup=meeting):
        step, join, weight, late, torchs = said
        assert step == join
        assert "run the model on x[:0]" in step
        assert "set_weight() came after a forward pass" in weight
        assert "BatchNorm layer '2' was converted after the model was wrapped" in late
        assert "torch.nn.SyncBatchNorm weighs ranks equally" in torchs
