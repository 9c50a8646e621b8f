"""Streams read by position, in one process."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import elche
from elche.errors import ConfigError, MismatchError
from elche.runtime.data.stream_data import StreamView, by_position
from elche.runtime.data.stream_reader import Stamp, StreamReader, fingerprint
from tests.runtime.report.test_single_metrics import set_up


class Drawn(IterableDataset[Any]):
    """(number, a draw from the global generators); counts how often it was opened."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.opened: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        self.opened.append(self.length)
        for number in range(self.length):
            yield number, random.random() + torch.rand(()).item()


class Endless(IterableDataset[Any]):
    """Numbers, for ever."""

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            yield torch.tensor([float(number)])
            number += 1


def reader(stream: Any, length: int) -> StreamReader:
    made = StreamReader(stream, length, loads_here=True, seed=3)
    made.begin_epoch(0)
    return made


@given(
    st.integers(1, 30).flatmap(
        lambda length: st.tuples(
            st.just(length),
            st.lists(
                st.tuples(
                    st.integers(0, 2),
                    st.lists(st.integers(0, length - 1), min_size=1, max_size=8),
                ),
                max_size=6,
            ),
        )
    )
)
def test_any_positions_in_any_order_give_the_same_samples(
    plan: tuple[int, list[tuple[int, list[int]]]],
) -> None:
    """What was read before, in this process or in a copy of it, makes no difference."""
    length, reads = plan
    whole = {
        epoch: reader(Drawn(length), length).read(epoch, range(length)).data
        for epoch in range(3)
    }
    assert len({str(items) for items in whole.values()}) == 3
    one = reader(Drawn(length), length)
    for epoch, positions in reads:
        assert one.read(epoch, positions).data == [whole[epoch][p] for p in positions]
        one = pickle.loads(pickle.dumps(one)) if len(positions) % 2 else one


class Counting(Drawn):
    """Yields other numbers each time it is opened."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return iter(range(100 * self.epoch, 100 * self.epoch + self.length))


def test_a_stream_that_counts_its_epochs_begins_an_epoch_alike_each_time() -> None:
    one = reader(Counting(10), 10)
    assert one.read(0, [1, 5]).data == [101, 105]
    assert one.read(0, [4]).data == [104]
    assert one.read(0, [3]).data == [103]
    one.begin_epoch(1)
    assert one.read(1, [1, 5]).data == [201, 205]
    assert one.read(1, [4]).data == [204]


def test_reading_with_a_seed_leaves_no_trace_on_the_global_generators() -> None:
    random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), torch.rand(()).item()
    random.seed(1)
    torch.manual_seed(1)
    one = reader(Drawn(10), 10)
    one.read(0, [4, 5])
    assert (random.random(), torch.rand(()).item()) == expected


def test_a_stream_that_ends_early_is_named_with_both_numbers() -> None:
    one = reader(Drawn(5), 8)
    with pytest.raises(ConfigError, match="Drawn ended after 5 of the 8 samples"):
        one.read(0, [6])
    with pytest.raises(ConfigError, match="Drawn ended after 0 of the 8 samples"):
        reader(Drawn(0), 8)


def test_what_follows_the_last_position_is_seen_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = reader(Drawn(9), 8)
    assert not one.read(0, [6]).stamp.has_more
    stamp = one.read(0, [7]).stamp
    assert stamp.has_more
    assert not reader(Drawn(8), 8).read(0, [7]).stamp.has_more
    one.check(stamp)
    one.check(stamp)
    (record,) = caplog.records
    assert "Drawn yields more than the 8 samples of an epoch" in record.getMessage()


def test_a_process_that_reads_something_else_is_refused() -> None:
    one = reader(Drawn(9), 8)
    stamp = one.read(0, [0]).stamp
    one.check(stamp)
    with pytest.raises(MismatchError, match="different samples from the stream Drawn"):
        one.check(Stamp(stamp.fingerprint + 1, has_more=False))


SAMPLES: list[Any] = [
    None,
    0,
    1.0,
    True,
    "a",
    b"a",
    "a" * 5000,
    "a" * 4999 + "b",
    [],
    (),
    [1, 2],
    (1, 2),
    {"a": 2},
    {"b": 1},
    torch.zeros(3),
    torch.zeros(3, dtype=torch.float64),
    torch.tensor([0.0, 0.0, 1e-30]),
    torch.zeros(3, 1),
    torch.arange(10_000),
    (torch.zeros(2), 1),
    (torch.zeros(2), 2),
    Drawn(3),
    Drawn(4),
]


def test_fingerprints_tell_samples_apart_and_stay_the_same() -> None:
    seen = [fingerprint(sample) for sample in SAMPLES]
    copies = [fingerprint(pickle.loads(pickle.dumps(sample))) for sample in SAMPLES]
    assert seen == copies
    assert len(set(seen)) == len(SAMPLES) - 1  # of long texts every fifth letter counts
    assert all(0 <= one < 2**56 for one in seen)


LOADER = DataLoader(Drawn(10), 4)
MAPPED = DataLoader(TensorDataset(torch.zeros(4, 1)), 2)


@pytest.mark.parametrize(
    ("loader", "samples", "world_size", "says"),
    [
        (LOADER, 0, 1, "expected samples_per_epoch to be an int >= 1, got 0"),
        (LOADER, 2.5, 1, "expected samples_per_epoch to be an int >= 1, got 2.5"),
        (LOADER, True, 2, "expected samples_per_epoch to be an int >= 1, got True"),
        (MAPPED, 4, 1, "got TensorDataset, whose sampler gives the length"),
        (
            DataLoader(Endless(), 4),
            None,
            2,
            "how long is an epoch of the stream Endless.*samples_per_epoch=N",
        ),
    ],
)
def test_lengths_that_are_none(
    loader: DataLoader[Any], samples: Any, world_size: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        by_position(loader, samples, world_size, None)


def test_what_is_left_alone() -> None:
    assert by_position(MAPPED, None, 4, 7) is MAPPED
    assert by_position(LOADER, None, 1, None) is LOADER
    endless = DataLoader(Endless(), 4)
    assert by_position(endless, None, 1, 7) is endless
    divided = by_position(LOADER, None, 2, None)
    assert isinstance(divided.dataset, StreamView)
    assert (len(divided), divided.batch_size, len(divided.dataset)) == (3, 4, 10)


@pytest.mark.usefixtures("plain_environment")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_one_device_an_epoch_can_be_cut(num_workers: int) -> None:
    plain = DataLoader(Endless(), 4, num_workers=num_workers)
    *_, loader = set_up(plain, samples_per_epoch=10)
    assert len(loader) == 3
    for _ in range(2):
        seen = [batch[:, 0].int().tolist() for batch in loader]
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert elche.epoch_metrics().samples == 10


@pytest.mark.usefixtures("plain_environment")
def test_on_one_device_a_seed_draws_by_position() -> None:
    draws = [
        [list(zip(*(part.tolist() for part in batch), strict=True)) for batch in loader]
        for *_, loader in (
            set_up(DataLoader(Drawn(10), 4), seed=5),
            set_up(DataLoader(Drawn(10), 4, num_workers=2), seed=5),
        )
    ]
    assert draws[0] == draws[1]
