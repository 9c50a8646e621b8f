"""A DataLoader's own ``__iter__``: honoured on several ranks, or refused by name."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ConfigError
from elche.runtime.data.leased_data import BatchFeed, IndexBatch
from elche.runtime.data.positions import enumerate_batches
from elche.runtime.own_iteration import own_loader
from elche.runtime.process.coordinator import serve_in_thread
from tests.distributed.cases.tasks import difference, identical
from tests.harness.rank_pool import RankPool
from tests.runtime.cases.own_loaders import (
    EPOCHS,
    SAMPLES,
    Infinite,
    Repeated,
    alone,
    made,
    on_ranks,
)

KINDS = [
    ("normalising", 0),
    ("normalising", 2),
    ("normalising stream", 0),
    ("filtering", 0),
    ("filtering", 2),
    ("infinite", 0),
    ("endless batches", 1),
    ("endless", 0),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_it_ends_as_on_one_device(ranks2: RankPool, kind: str, workers: int) -> None:
    found = ranks2.run(on_ranks, kind, "sync", workers, case_setup=serve_in_thread)
    expected = alone(kind, workers)
    assert [each.error for each in found] == ["", ""]
    assert identical([each.state for each in found])
    assert difference(found[0].state, expected.state) <= 1e-13
    for epoch, seen in enumerate(expected.seen):
        assert sorted(found[0].seen[epoch] + found[1].seen[epoch]) == sorted(seen)
    assert [each.counts for each in found] == [expected.counts] * 2


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize(("kind", "workers"), [KINDS[1], KINDS[4], KINDS[5]])
def test_windows_train_on_the_same_data(
    ranks2: RankPool, kind: str, workers: int, policy: str
) -> None:
    """Each sample once, as the loader's own iteration makes it."""
    found = ranks2.run(on_ranks, kind, policy, workers, case_setup=serve_in_thread)
    expected = alone(kind, workers)
    assert [each.error for each in found] == ["", ""]
    assert identical([each.state for each in found])
    for epoch in range(EPOCHS):
        seen = [number for each in found for number in each.seen[epoch]]
        assert sorted(seen) == list(range(SAMPLES))
        total = sum(each.sums[epoch] for each in found)
        assert total == pytest.approx(expected.sums[epoch])
    assert [each.counts for each in found] == [expected.counts] * 2


AHEAD = "Iterating fetches ahead, merges or drops"
EXTRA = "Iterating yields a batch that it has not drawn"
REFUSED = {
    **dict.fromkeys(("ahead", "dropping"), AHEAD),
    **dict.fromkeys(("splitting", "longer", "indexing"), EXTRA),
    "short": "Iterating ends after 2 batches",
    "in a thread": "Iterating draws its batches in another thread",
}


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "says"), REFUSED.items())
def test_what_is_not_one_for_one_is_refused(
    ranks2: RankPool, kind: str, says: str
) -> None:
    for each in ranks2.run(on_ranks, kind, "sync", case_setup=serve_in_thread):
        assert re.search(says, each.error), each.error


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_loop_in_two_threads_is_refused(ranks2: RankPool, policy: str) -> None:
    found = ranks2.run(
        on_ranks, "plain", policy, loop="in a thread", case_setup=serve_in_thread
    )
    assert all("iterated in another thread" in each.error for each in found), found


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_statistics_over_the_ranks_loader_are_refused(
    ranks2: RankPool, policy: str
) -> None:
    found = ranks2.run(
        on_ranks, "plain", policy, loop="update_bn", case_setup=serve_in_thread
    )
    assert all("give update_bn the plain" in each.error for each in found), found


@pytest.mark.distributed
def test_other_passes_without_gradients_are_not(ranks2: RankPool) -> None:
    """An evaluation over the ranks' loader; statistics over the plain one, and of
    layers in which ranks meet."""
    for loop in ("evaluated", "update_bn, plain", "update_bn, converted"):
        found = ranks2.run(
            on_ranks, "plain", "sync", loop=loop, case_setup=serve_in_thread
        )
        assert [each.error for each in found] == ["", ""]
        assert identical([each.state for each in found])
        if loop == "update_bn, converted":
            assert max(found[0].sums[-2:]) <= 1e-12


@pytest.mark.parametrize("kind", ["normalising", "filtering", "infinite", "ahead"])
def test_one_device_that_draws_by_position(kind: str) -> None:
    """It keeps its meaning there as well; and may fetch ahead, as all is queued."""
    found, expected = on_ranks(kind, "sync"), alone(kind)
    assert found.error == ""
    assert difference(found.state, expected.state) == 0
    assert (found.seen, found.counts) == (expected.seen, expected.counts)


def test_torchdata_iterates_as_torch_does() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert own_loader(stateful.StatefulDataLoader([1, 2])) is None
    assert own_loader(DataLoader([1, 2])) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["endless", "endless batches"])
def test_an_endless_sampler_is_drawn_len_times(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = made(kind)
    for epoch in range(2):
        keys, sizes = enumerate_batches(loader, epoch)
        assert keys == [*range(SAMPLES), *range(SAMPLES)][: sizes.num_samples]
        assert sizes.num_batches == len(loader) == 7
    assert len(caplog.records) == 1
    assert "is endless: an epoch is len() = 7 batches" in caplog.text


def test_a_wrong_length_is_not_endless() -> None:
    """As one device draws it: to its end."""
    batches = [[number] for number in range(30)]

    class Wrong(Repeated):
        def __iter__(self) -> Iterator[Any]:
            return iter(self.sampler)

        def __len__(self) -> int:
            return 4

    loader = DataLoader(list(range(30)), batch_sampler=Wrong(batches))  # type: ignore[arg-type]
    assert enumerate_batches(loader, 0)[0] == list(range(30))
    assert enumerate_batches(loader, 1, 3)[0] == [0, 1, 2]
    assert enumerate_batches(loader, 1, 9)[0] == list(range(9))


@pytest.mark.parametrize(
    "loader", [[torch.full((3,), 9.0)] * 4, iter([1]), Repeated(0)]
)
def test_other_loaders_are_named(loader: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"got (list|list_iterator|Repeated): ") as it:
        elche.setup(model, optimizer, loader)
    assert "samples_per_epoch" in str(it.value)
    assert "9." not in str(it.value)


class Scripted(DataLoader[Any]):
    """Does with batches what a list of operations says, again and again."""

    operations: list[str]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches, held = super().__iter__(), []
        for step in range(10_000):
            operation = self.operations[step % len(self.operations)]
            if operation == "d":
                try:
                    held.append(next(batches))
                except StopIteration:
                    break
            if operation == "y" and held:
                yield held.pop()
            if operation == "r" and held:
                yield held[-1]
            if operation == "l" and held:
                held.pop()
        yield from held


@settings(max_examples=300, deadline=None)
@given(
    operations=st.lists(st.sampled_from("ddyyr"), max_size=4)
    | st.lists(st.sampled_from("ddyyl"), max_size=4),
    total=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_batches_keep_their_tags_or_are_refused(
    operations: list[str], total: int, seed: int
) -> None:
    """Draws, yields, repeats or loses: batches have their tags, or it is refused."""
    draw, left = random.Random(seed), list(range(total))
    loader = Scripted(TensorDataset(torch.arange(float(total))), batch_size=1)
    loader.operations = ["d", *operations, "y"]
    feed: BatchFeed[int]

    def refill() -> None:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if left:
                feed.push(left[0], IndexBatch([left.pop(0)]))
        if not left:
            feed.end()

    feed = BatchFeed(loader, torch.Generator(), refill)
    is_plain = operations in ([], ["y"]) or not set(operations) - {"y"}
    seen: list[int] = []
    try:
        feed.start(0)
        for _ in range(2000):
            got = feed.next()
            if got is not None:
                assert got[1][0].item() == got[0] == len(seen)
                seen.append(got[0])
            if len(seen) == total:
                break
        feed.finish()
    except ConfigError:
        assert not is_plain
        return
    assert seen == list(range(total))


def test_it_goes_on_where_an_epoch_is_cut() -> None:
    """One iteration in both parts; a lease that was given back is loaded again."""
    loader = made("normalising")
    feed: BatchFeed[int] = BatchFeed(loader, torch.Generator(), lambda: None)
    for part in (range(4), range(2, 4)):
        feed.start(7)
        for batch in part:
            feed.push(batch, IndexBatch([batch]))
        feed.end()
        got = [feed.next() for _ in range(2)]
        assert [each and each[0] for each in got] == [*part][:2]
        feed.finish()
    assert (loader.epoch, loader.ended) == (1, 1)


def test_the_users_loader_is_untouched() -> None:
    """Iterating it by hand draws its own batches, with its own workers."""
    loader = Infinite(TensorDataset(torch.zeros(4), torch.zeros(4), torch.zeros(4)), 2)
    kept, before = loader.iterator, dict(vars(loader))
    feed: BatchFeed[int] = BatchFeed(loader, torch.Generator(), lambda: None)
    feed.start(0)
    feed.push(0, IndexBatch([0, 1, 2]))
    got = feed.next()
    assert got is not None
    assert len(got[1][0]) == 3
    del feed
    assert loader.iterator is kept
    assert vars(loader) == before
    assert [len(batch[0]) for batch in loader] == [2, 2]
