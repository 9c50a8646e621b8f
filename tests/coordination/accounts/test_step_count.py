"""Steps of a run are a single process' batches, however epochs end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.step_count import StepCount

SIZES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=4
).map(lambda runs: BatchSizes(tuple(runs)))


@given(SIZES, st.data())
def test_samples_fill_batches_in_order(sizes: BatchSizes, data: st.DataObject) -> None:
    batch = data.draw(st.integers(0, sizes.num_batches - 1))
    before, size = sizes.samples_in(0, batch), sizes.run_of(batch)[0]
    assert sizes.batches_in(before) == batch
    part = data.draw(st.floats(0.0, 1.0))
    assert abs(sizes.batches_in(before + part * size) - (batch + part)) < 1e-9
    assert sizes.batches_in(sizes.num_samples + 5.0) == sizes.num_batches
    assert sizes.batches_in(-3.0) == 0.0


@given(SIZES, st.integers(0, 60))
def test_whole_epochs_and_a_cut_one_make_the_steps(sizes: BatchSizes, n: int) -> None:
    count, taken = StepCount(), 0
    while left := count.left(n):
        cut = BatchSizes.of(
            [sizes.run_of(batch)[0] for batch in range(sizes.num_batches)][:left]
        )
        count.begin_epoch(cut)
        assert count.of_epoch == cut.num_batches
        taken += cut.num_batches
        assert count.at(0) < count.at(1) <= count.at(cut.num_samples) == taken
        count.end_epoch(0, is_early=False)  # all was discarded: it is done all the same
        assert count.at(0) == count.before == taken
    assert taken == n


@given(SIZES, st.integers(1, 60), st.lists(st.floats(0.0, 1.0), max_size=5))
def test_early_ends_count_what_was_trained(
    sizes: BatchSizes, n: int, parts: list[float]
) -> None:
    count, trained = StepCount(), 0.0
    for part in parts:
        samples = round(part * sizes.num_samples)
        count.begin_epoch(sizes)
        count.end_epoch(samples, is_early=True)
        trained += sizes.batches_in(samples)
    assert abs(count.before - trained) < 1e-9
    assert max(0.0, n - trained) <= count.left(n) + 1e-6
    assert count.left(n) < max(0.0, n - trained) + 1.0
