"""A DataLoader's own ``__iter__``: honoured on several ranks, or refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import elche
from elche.errors import ConfigError
from elche.runtime.data.leased_data import BatchFeed
from elche.runtime.data.positions import IndexBatch, enumerate_batches
from tests.distributed.cases.tasks import difference, identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.runtime.data.cases.own_loaders import SAMPLES, alone, made, on_ranks

NEW_RANKS = True

KINDS = [
    ("normalising", 0, "sync"),
    ("normalising", 2, "cadence"),
    ("filtering", 0, "sync"),
    ("filtering", 2, "async"),
    ("endless", 0, "sync"),
    ("infinite", 0, "cadence"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "workers", "policy"), KINDS)
def test_it_keeps_its_meaning(
    ranks2: RankPool, kind: str, workers: int, policy: str
) -> None:
    """Exact under `sync`; in windows each sample once, made by its own iteration."""
    found = ranks2.run(on_ranks, kind, policy, workers, case_setup=serve_in_thread)
    expected = alone(kind, workers)
    assert [each.error for each in found] == ["", ""]
    assert identical([each.state for each in found])
    if policy == "sync":
        assert difference(found[0].state, expected.state) <= 1e-13
    for epoch, seen in enumerate(expected.seen):
        assert sorted(found[0].seen[epoch] + found[1].seen[epoch]) == sorted(seen)
        total = sum(each.sums[epoch] for each in found)
        assert total == pytest.approx(expected.sums[epoch])
    assert [each.counts for each in found] == [expected.counts] * 2


REFUSED = {
    **dict.fromkeys(("ahead", "dropping"), "Iterating fetches ahead, merges or drops"),
    "splitting": "Iterating yields a batch twice",
    "short": "Iterating drops batches, or ends",
    "in a thread": "Iterating draws its batches in another thread",
}


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "says"), REFUSED.items())
def test_what_is_not_one_for_one_is_refused(
    ranks2: RankPool, kind: str, says: str
) -> None:
    """On ranks, and on one device that draws by position."""
    found = ranks2.run(on_ranks, kind, "sync", case_setup=serve_in_thread)
    for each in [*found, on_ranks(kind, "sync")]:
        assert re.search(says, each.error), each.error


LOOPS = [
    ("in a thread", "cadence", "iterated in another thread"),
    ("update_bn", "sync", "give update_bn the plain"),
    ("update_bn, plain", "sync", "^$"),
    ("evaluated", "sync", "^$"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("loop", "policy", "says"), LOOPS)
def test_loops(ranks2: RankPool, loop: str, policy: str, says: str) -> None:
    found = ranks2.run(on_ranks, "plain", policy, loop=loop, case_setup=serve_in_thread)
    assert all(re.search(says, each.error) for each in found), found


@pytest.mark.parametrize("kind", ["normalising", "endless", "infinite"])
def test_one_device_that_draws_by_position(kind: str) -> None:
    found, expected = on_ranks(kind, "sync"), alone(kind)
    assert found.error == ""
    assert difference(found.state, expected.state) == 0
    assert (found.seen, found.counts) == (expected.seen, expected.counts)


def test_an_endless_sampler_is_drawn_len_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = made("endless")
    for epoch in range(2):
        keys, sizes = enumerate_batches(loader, epoch)
        assert keys == [*range(SAMPLES), *range(SAMPLES)][: sizes.num_samples]
        assert sizes.num_batches == len(loader) == 7
    assert len(caplog.records) == 1
    assert "is endless: an epoch is len() = 7 batches" in caplog.text


def test_a_wrong_length_is_not_endless() -> None:
    """As one device draws it: to its end."""

    class Wrong(list[Any]):
        def __len__(self) -> int:
            return 4

    wrong = Wrong([number] for number in range(30))
    loader = DataLoader(list(range(30)), batch_sampler=wrong)  # type: ignore[arg-type]
    assert enumerate_batches(loader, 0)[0] == list(range(30))
    assert enumerate_batches(loader, 1, 3)[0] == [0, 1, 2]
    assert enumerate_batches(loader, 1, 9)[0] == list(range(9))


@pytest.mark.parametrize("loader", [[torch.full((3,), 9.0)] * 4, iter([1])])
def test_other_loaders_are_named(loader: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"got (list|list_iterator): ") as it:
        elche.setup(model, optimizer, loader)
    assert "samples_per_epoch" in str(it.value)
    assert "9." not in str(it.value)


def test_it_goes_on_where_an_epoch_is_cut() -> None:
    """One iteration in both parts, also where all that was given out is loaded."""
    loader = made("normalising")
    feed: BatchFeed[int] = BatchFeed(loader, torch.Generator(), lambda: None)
    for part in (range(4), range(2, 4), range(4, 6)):
        feed.start(7)
        for batch in part:
            feed.push(batch, IndexBatch([batch]))
        feed.end()
        got = [feed.next() for _ in range(2)]
        assert [each and each[0] for each in got] == [*part][:2]
        feed.finish(is_over=part.stop == 6)
    assert (loader.epoch, loader.ended) == (1, 1)
