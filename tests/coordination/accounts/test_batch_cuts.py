"""Global batches cut into the local batches of windows."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.config import RunConfig
from elche.config_parts import WindowConfig
from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes
from elche.coordination.accounts.local_batches import check_local_batches, local_cut
from elche.coordination.agreement import Settings
from elche.errors import ConfigError, ProtocolError

CUTS = st.builds(BatchCut, st.integers(1, 9), st.integers(0, 12), st.integers(1, 3))
RUNS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=5
)


def parts_in_full(runs: list[tuple[int, int]], cut: BatchCut) -> list[list[int]]:
    """Sizes of the local batches of each global one, written out."""
    whole = []
    for samples, count in runs:
        parts = cut.parts_of(samples)
        sizes = [samples // parts + (i < samples % parts) for i in range(parts)]
        whole += [sizes] * count
    return whole


@given(RUNS, CUTS)
def test_a_cut_epoch_is_its_batches_written_out(
    runs: list[tuple[int, int]], cut: BatchCut
) -> None:
    sizes, full = BatchSizes(tuple(runs), cut), parts_in_full(runs, cut)
    flat = [samples for parts in full for samples in parts]
    assert sizes.num_batches == len(flat)
    assert sizes.num_samples == sum(flat) == BatchSizes(tuple(runs)).num_samples
    batch = position = 0
    for whole, parts in enumerate(full):
        start = 0
        for samples in parts:
            assert sizes.run_of(batch)[0] == samples
            assert sizes.part_of(batch) == (whole, start, start + samples)
            assert sizes.position_of(batch) == position
            end = sizes.run_of(batch)[1]
            assert batch < end
            assert set(flat[batch:end]) == {samples}
            batch, start, position = batch + 1, start + samples, position + samples
    assert batch == sizes.num_batches
    assert sizes.position_of(batch) == position


@given(RUNS, CUTS, st.data())
def test_samples_of_ranges_add_up(
    runs: list[tuple[int, int]], cut: BatchCut, data: st.DataObject
) -> None:
    sizes = BatchSizes(tuple(runs), cut)
    flat = [samples for parts in parts_in_full(runs, cut) for samples in parts]
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    assert sizes.samples_in(start, stop) == sum(flat[start:stop])


@given(st.integers(1, 300), CUTS)
def test_local_batches_are_nearly_equal_and_within_their_bounds(
    samples: int, cut: BatchCut
) -> None:
    (parts,) = parts_in_full([(samples, 1)], cut)
    assert sum(parts) == samples
    assert max(parts) - min(parts) <= 1
    assert max(parts) == cut.largest_of(samples)
    assert min(parts) >= min(cut.least, samples)
    if cut.most and samples >= cut.least * -(-samples // cut.most):
        assert max(parts) <= cut.most
    elif not cut.most and samples >= cut.parts * cut.least:
        assert len(parts) == cut.parts


def test_a_batch_is_cut_by_ranks_unless_a_size_is_given() -> None:
    assert parts_in_full([(32, 1)], local_cut(WindowConfig(), 3, 1)) == [[11, 11, 10]]
    given = WindowConfig(local_batch_size=12)
    assert parts_in_full([(32, 1)], local_cut(given, 2, 1)) == [[11, 11, 10]]
    whole = WindowConfig(local_batch_size=32)
    assert parts_in_full([(32, 2), (7, 1)], local_cut(whole, 2, 1)) == [[32], [32], [7]]
    few = local_cut(WindowConfig(), 4, 1)
    assert parts_in_full([(3, 1)], few) == [[1, 1, 1]]
    normed = local_cut(WindowConfig(), 4, 2)
    assert parts_in_full([(5, 1), (1, 1)], normed) == [[3, 2], [1]]


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "sizes"),
    [
        ((0, 1, 2), False, [4, 4, 4]),
        ((1, 2), False, [4, 4, 4]),
        ((0, 2), False, [6, 6]),
        ((1,), False, [4, 4, 4]),
        ((1, 2), True, [6, 6]),
    ],
)
def test_local_batches_of_who_is_left_fit_their_devices(
    ranks: tuple[int, ...], micro_batches: bool, sizes: list[int]
) -> None:
    config = RunConfig(max_samples={1: 5})
    cut = Settings(config=config, micro_batches=micro_batches).cut_for(ranks)
    assert parts_in_full([(12, 1)], cut) == [sizes]
    few = BatchSizes(((12, 1), (1, 1)), cut)  # the sum over a part counts for its whole
    factors = [few.factor_of(batch) for batch in range(few.num_batches)]
    assert factors == [*([len(sizes)] * len(sizes)), 1]


@pytest.mark.parametrize(
    ("local", "ranks", "least", "batch_size", "says"),
    [
        (None, 4, 2, 7, r"local batches of 1 on 4 ranks.*batch_size=8 or more, or set"),
        (1, 2, 2, None, "local_batch_size=1, but the model has BatchNorm"),
        (33, 2, 1, 32, "local_batch_size=33 is more than batch_size=32"),
        (None, 4, 2, 8, ""),
        (2, 4, 2, 4, ""),
        (None, 4, 1, 2, ""),
        (None, 8, 2, None, ""),
        (5, 2, 1, 5, ""),
    ],
)
def test_local_batches_that_cannot_be_are_refused(
    local: int | None, ranks: int, least: int, batch_size: int | None, says: str
) -> None:
    windows = WindowConfig(local_batch_size=local)
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        check_local_batches(windows, ranks, least, batch_size)


def test_a_batch_outside_of_the_epoch_is_refused() -> None:
    sizes = BatchSizes(((4, 2),), BatchCut(2))
    for batch in (-1, 5):
        with pytest.raises(ProtocolError, match=f"batch {batch} is outside 0..3"):
            sizes.position_of(batch)
