"""Lines that a rank writes for people."""

from __future__ import annotations

import logging

import pytest
import torch

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.metrics import EpochMetrics
from elche.runtime.data.positions import EpochPositions
from elche.runtime.report.notifications import RunNotifications, warn_discarded

KEYS = [7, 3, 9, 1, 8, 2, 6]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (torch.tensor(KEYS), "[9, 1, 8, 2, 6]"),
        ([f"s{key}" for key in KEYS], "['s9', 's1', 's8', 's2', 's6']"),
    ],
)
def test_a_discarded_update_is_told_with_its_rank_batches_and_samples(
    keys: torch.Tensor | list[str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The samples are keys of the data set, as the sampler drew them."""
    positions = EpochPositions(keys, BatchSizes(((2, 3), (1, 1))), 4, None)
    with caplog.at_level(logging.WARNING, "elche"):
        warn_discarded(3, [(1, 2), (2, 4)], positions)
    (said,) = caplog.messages
    assert said.startswith("rank 3: the update of epoch 4 from batches 1 to 3 ")
    assert said.endswith(f"samples {named}")


def epoch_of(samples: tuple[int, ...], busy_s: tuple[float, ...]) -> EpochMetrics:
    nothing = (0.0,) * len(samples)
    return EpochMetrics(
        epoch=0,
        synchronisations=1,
        duration_s=2.0,
        rank_samples=samples,
        discarded_samples=(0,) * len(samples),
        busy_s=busy_s,
        data_wait_s=nothing,
        transfer_s=nothing,
        sync_wait_s=nothing,
    )


def test_a_run_is_summed_up_by_its_last_epoch() -> None:
    kept = RunNotifications(0)
    assert kept.summary("sync", "sync") == ""
    kept.add(epoch_of((1, 1), (1.0, 1.0)))
    kept.add(epoch_of((75, 25), (1.5, 1.8)))
    assert kept.summary("cadence", "cadence") == (
        "elche: last epoch: 1.00 times the fastest device's own speed; shares 75 %, "
        "25 %; policy cadence"
    )
    kept.add(epoch_of((75, 75), (2.2, 2.2)))  # 75 a second, of 68 that all deliver
    assert kept.summary("sync", "sync") == (
        "elche: last epoch: shares 50 %, 50 %; policy sync"
    )
    kept.choices.append(("async", "because; from the next epoch on"))
    assert kept.summary("auto", "cadence").endswith("; policy auto (cadence)")


def test_shares_of_many_ranks_are_not_all_shown() -> None:
    kept = RunNotifications(0)
    kept.add(epoch_of((5,) * 20, (1.0,) * 20))
    said = kept.summary("sync", "sync")
    assert "20.00 times" not in said
    assert "10.00 times" in said
    assert said.endswith("5 %, and 4 more; policy sync")


@pytest.mark.parametrize(
    "epoch", [epoch_of((8,), (1.0,)), epoch_of((0, 0), (0.0, 0.0))]
)
def test_without_other_ranks_or_samples_there_is_no_sum(epoch: EpochMetrics) -> None:
    kept = RunNotifications(0)
    kept.add(epoch)
    assert kept.summary("sync", "sync") == ""


def test_what_whole_samples_cost_is_a_line_where_it_is_much() -> None:
    kept = RunNotifications(0)
    assert kept.whole_sample_bound(32) == ""
    kept.add(epoch_of((100, 67, 40, 25), (1.0, 1.0, 1.0, 1.0)))
    assert kept.whole_sample_bound(32) == (
        "elche: shares of whole samples limit a batch of 32 to 0.92 of the devices' "
        "speed; from batch 128 on they cost under 2 %"
    )
    assert kept.whole_sample_bound(128) == ""
