"""Who made the model no number under ``sync``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.protocol.events import StepsDone
from elche.coordination.sync.nonfinite import (
    PATIENCE_REPORTS,
    NonFiniteRecord,
    NonFiniteReports,
)
from elche.errors import NonFiniteError
from tests.coordination.test_core import steps_done
from tests.harness.reached import reach


def report(rank: int, numbers: NonFiniteRecord, step: int) -> StepsDone:
    said = {"is_finite": numbers.is_finite, "broken": numbers.broken}
    return steps_done(rank, step, step + 1, **said)


@pytest.mark.reaches("several culprits", "skipped steps", "accumulated steps")
@given(st.data())
def test_whoever_was_first_is_named_and_what_was_skipped_is_not(
    data: st.DataObject,
) -> None:
    """Ranks see their own gradients; from the step that is taken along none, all do."""
    ranks, lost_at = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 12))
    held = data.draw(st.integers(1, 4), label="steps of accumulation")
    culprits = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    # A GradScaler skips these; the batch that spoils the model comes after them.
    skipped = data.draw(
        st.sets(st.tuples(st.integers(0, ranks - 1), st.integers(0, 11)))
    )
    skipped = {(r, s) for r, s in skipped if s < lost_at - 1}
    reach("several culprits", len(culprits) > 1)
    reach("skipped steps", len(skipped))
    reach("accumulated steps", held > 1)
    numbers = [NonFiniteRecord() for _ in range(ranks)]
    steps = NonFiniteReports()
    stops_at = lost_at + held - 1
    for step in range(stops_at + 1):
        for rank, own in enumerate(numbers):
            is_first = step == lost_at and rank in culprits
            is_none = step > lost_at or is_first or (rank, step) in skipped
            part = (0, step, 0, 4 * rank, 4 * rank + 4)
            own.gradients(part, 0, is_finite=not is_none)
            own.is_finite = step < stops_at
            steps.take(report(rank, own, step))
        if step < stops_at:
            steps.check(0, range(ranks), is_last=False)
    with pytest.raises(NonFiniteError, match="have become NaN in epoch 0") as no:
        steps.check(0, range(ranks), is_last=False)
    assert no.value.batches == ((lost_at, lost_at + 1),)
    if len(culprits) == 1:
        (rank,) = culprits
        assert (no.value.rank, no.value.part) == (rank, (4 * rank, 4 * rank + 4))
        assert f"rank {rank}'s own, in step {lost_at}" in str(no.value)
    else:
        assert (no.value.rank, no.value.part) == (None, ())
        assert f"ranks {sorted(culprits)} first had" in str(no.value)


def test_what_an_epoch_leaves_to_the_next_is_the_fault_of_who_began_it() -> None:
    # Once: counted anew in each epoch, in whose first pass all ranks' are none.
    steps, numbers = NonFiniteReports(), [NonFiniteRecord(), NonFiniteRecord()]
    numbers[1].gradients((2, 7, 0, 4, 8), 0, is_finite=False)
    for rank, own in enumerate(numbers):
        own.gradients((3, 0, 0, 4 * rank, 4 * rank + 4), 0, is_finite=False)
        own.is_finite = False
        steps.take(report(rank, own, 0))
    with pytest.raises(
        NonFiniteError, match="rank 1's own, in step 7 of epoch 2"
    ) as no:
        steps.check(3, (0, 1), is_last=False)
    # Batches are named by their number in the epoch that ends.
    assert (no.value.rank, no.value.batches, no.value.part) == (1, (), ())


def test_a_rank_that_finds_out_later_is_waited_for_but_not_for_ever() -> None:
    lost, fine, steps = NonFiniteRecord(), NonFiniteRecord(), NonFiniteReports()
    lost.is_finite = False
    for step in range(PATIENCE_REPORTS):
        steps.check(0, (0, 1), is_last=False)
        steps.take(report(0, lost, step))
        steps.take(report(1, fine, step))
    with pytest.raises(NonFiniteError, match="no rank has seen a gradient of its own"):
        steps.check(0, (0, 1), is_last=False)
    steps = NonFiniteReports()
    steps.check(0, (0, 1), is_last=True)
    steps.take(report(0, lost, 0))
    with pytest.raises(NonFiniteError, match="have become NaN"):
        steps.check(0, (0, 1), is_last=True)


def test_of_one_step_the_first_pass_tells() -> None:
    """Its sum is none on all ranks, in whose next pass it shows."""
    steps = NonFiniteReports()
    for rank, number in ((0, 1), (1, 0)):
        own = NonFiniteRecord()
        own.gradients((0, 3, number, 4 * rank, 4 * rank + 4), 0, is_finite=False)
        own.is_finite = False
        steps.take(report(rank, own, 3))
    with pytest.raises(NonFiniteError, match="rank 1's own, in step 3, of samples 4"):
        steps.check(0, (0, 1), is_last=False)
