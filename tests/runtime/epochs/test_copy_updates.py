"""Updates of averaged copies in an epoch that is cut, as one process makes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.copy_updates import DueUpdates
from elche.runtime.epochs.epoch_execution import EpochExecution

BATCH = 32


def ratio_of(execution: Any, sizes: BatchSizes, left: int) -> tuple[int, int]:
    """Ratio for a part of windows with so many samples left."""
    positions = SimpleNamespace(sizes=SimpleNamespace(num_samples=left))
    return EpochExecution._copy_ratio(
        execution,
        SimpleNamespace(sizes=sizes, positions=positions),  # type: ignore[arg-type]
    )


@given(
    st.integers(1_000, 3_000),
    st.lists(st.integers(1, 2_999), max_size=6),
    st.booleans(),
)
def test_a_cut_epoch_updates_copies_as_often_as_a_whole_one(
    samples: int, cuts: list[int], begins_in_steps: bool
) -> None:
    """Once each part divided its rest anew, and one update came too many or too few."""
    runs = (BATCH, samples // BATCH), (samples % BATCH, 1)
    sizes = BatchSizes(tuple(run for run in runs if run[0]))
    steps = SimpleNamespace(of_epoch=sizes.num_batches)
    execution = SimpleNamespace(
        _windowed=-1,
        _stepped=-1,
        _ratio=(0, 0),
        _opening=SimpleNamespace(epoch=3),
        _observer=SimpleNamespace(steps=steps),
    )
    due, updates, done = DueUpdates(), 0, 0
    if begins_in_steps:
        execution._stepped, done = 3, 10 * BATCH
        updates = 10
    for end in sorted({*(cut for cut in cuts if done < cut < samples), samples}):
        batches, of = ratio_of(execution, sizes, samples - done)
        updates += due.take(end - done, batches, of)
        done = end
    assert updates == sizes.num_batches
