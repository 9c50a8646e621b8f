"""Scalars and metrics of several ranks: weighted by samples, whoever logged them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch.nn.functional as F

import elche
from tests.distributed.cases.tasks import Task, build
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = pytest.mark.distributed

POLICIES = ["sync", "cadence", "async"]
TWO_TO_ONE = [
    {"ELCHE_SPEED": "1", "ELCHE_MS_PER_SAMPLE": "0.5"},
    {"ELCHE_SPEED": "0.5", "ELCHE_MS_PER_SAMPLE": "0.5"},
]
SAMPLES, EPOCHS = 200, 2


@dataclass
class Seen:
    """What a rank saw of the metrics."""

    windows: list[elche.monitor.WindowMetrics] = field(default_factory=list)
    epochs: list[elche.monitor.EpochMetrics] = field(default_factory=list)


def _log(policy: str) -> Seen:
    """Logs the samples' own numbers, and one value that is none, on rank 1."""
    model, optimizer, loader = build(Task(samples=SAMPLES, batch_size=8))
    model, optimizer, loader = elche.setup(model, optimizer, loader, policy=policy)
    seen = Seen()
    for epoch in range(EPOCHS):
        for x, y, index, _ in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            elche.log_scalar("index", index.double().mean())
            elche.log_scalar("rank", elche.rank())
            if elche.rank() == 1:
                elche.log_scalar("broken", loss * math.nan)
            seen.windows += elche.metrics()
        elche.log_scalar("index", 1e9)
        seen.epochs.append(elche.epoch_metrics(epoch=epoch))
    elche.shutdown()
    seen.windows += elche.metrics()
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_means_are_over_all_samples(ranks2: RankPool, policy: str) -> None:
    first, second = ranks2.run(_log, policy, case_setup=serve_in_thread, env=TWO_TO_ONE)
    assert first.epochs == second.epochs
    for number, epoch in enumerate(first.epochs):
        assert (epoch.epoch, epoch.samples) == (number, SAMPLES)
        assert epoch.scalars["index"] == pytest.approx((SAMPLES - 1) / 2, rel=1e-12)
        assert epoch.scalars["rank"] == pytest.approx(epoch.shares[1], rel=1e-12)
        assert (epoch.non_finite.get("broken", 0) > 0) == (epoch.rank_samples[1] > 0)
        assert "broken" not in epoch.scalars
        assert epoch.synchronisations >= 1
        assert not any(epoch.transfer_s)  # to a CPU nothing is moved
        assert max(epoch.busy_s) <= epoch.duration_s
        assert [each > 0.0 for each in epoch.busy_s] == [
            each > 0 for each in epoch.rank_samples
        ]
        for busy_s, data_wait_s, transfer_s in zip(
            epoch.busy_s, epoch.data_wait_s, epoch.transfer_s, strict=True
        ):
            assert data_wait_s + transfer_s <= busy_s
    # On a busy machine a rank may once seem too slow for an epoch, not for the first.
    assert min(first.epochs[0].rank_samples) > 0
    assert sum(first.epochs[1].shares) == pytest.approx(1.0)
    assert second.windows == []  # rank 0 has them, and they add up to the epochs
    for epoch in first.epochs:
        mine = [each for each in first.windows if each.epoch == epoch.epoch]
        numbers = [each.window for each in mine]
        assert numbers == sorted(set(numbers))
        for rank in range(2):
            samples = sum(each.rank_samples[rank] for each in mine)
            assert samples == epoch.rank_samples[rank]
        assert sum(each.synchronisations for each in mine) == epoch.synchronisations
        weighted = sum(each.scalars["index"] * each.samples for each in mine)
        assert weighted / SAMPLES == pytest.approx((SAMPLES - 1) / 2, rel=1e-9)
