"""The ledger goes on from what was settled, whenever it was asked."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.batch_ranges import BatchSizes
from elche.coordination.ledger import EpochLedger
from elche.errors import TransitionError

pytestmark = pytest.mark.hypothesis

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=20).map(BatchSizes.of)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "lease",
                "train",
                "close",
                "stage",
                "commit",
                "discard",
            ]
        ),
        st.integers(0, 2),
        st.integers(1, 4),
    ),
    max_size=60,
)


def _move(ledger: EpochLedger, what: str, holder: int, most: int) -> None:
    """One thing that may happen, where it may happen."""
    if what == "lease" and ledger.pooled:
        ledger.lease(holder, most)
    elif what == "train" and ledger.leased(holder):
        start, _ = ledger._holdings[holder].leased[0]
        ledger.train(holder, start, start + 1)
    elif what == "close":
        ledger.close(holder)
    elif what == "stage" and not ledger.staged_samples:
        ledger.stage()
    elif what == "commit":
        ledger.commit()
    elif what == "discard":
        parts, committed = ledger.parts(holder), ledger.committed_samples
        assert ledger.discard(holder) == parts
        assert (ledger.parts(holder), ledger.committed_samples) == ((), committed)
        ledger.check()


@given(SIZES, MOVES)
def test_every_batch_once_over_a_break(
    sizes: BatchSizes, moves: list[tuple[str, int, int]]
) -> None:
    ledger = EpochLedger(sizes, range(3))
    for what, holder, most in moves:
        _move(ledger, what, holder, most)
    state = json.loads(json.dumps(ledger.state_dict()))
    later = EpochLedger(sizes, [7])  # another membership
    later.load_state_dict(state)
    later.check()
    assert later.committed_samples == ledger.committed_samples
    trained = []
    while later.pooled:
        start, stop = later.lease(7, 3)
        later.train(7, start, stop)
        trained += range(start, stop)
    later.close(7)
    later.stage()
    later.commit()
    later.check()
    settled = [
        batch
        for part in (*state["committed"], *state["left_out"])
        for batch in range(*part)
    ]
    assert sorted(trained + settled) == list(range(sizes.num_batches))
    assert later.is_done


def test_a_state_of_another_epoch_is_refused() -> None:
    state = EpochLedger(BatchSizes(((4, 3),)), [0]).state_dict()
    other = EpochLedger(BatchSizes(((4, 2),)), [0])
    with pytest.raises(TransitionError, match=r"but the state is of \(\(4, 3\),\)"):
        other.load_state_dict(state)


def test_a_ledger_that_has_begun_takes_no_state() -> None:
    ledger = EpochLedger(BatchSizes(((4, 3),)), [0])
    state = ledger.state_dict()
    ledger.lease(0, 1)
    with pytest.raises(TransitionError, match="before its first lease"):
        ledger.load_state_dict(state)


def test_what_is_discarded_is_done_and_outlives_a_break() -> None:
    ledger = EpochLedger(BatchSizes(((4, 3),)), [0, 1])
    for holder in (0, 1):
        start, stop = ledger.lease(holder, 1)
        ledger.train(holder, start, stop)
        ledger.close(holder)
    assert ledger.discard(1) == ((1, 2),)
    ledger.remove(1)
    ledger.stage()
    ledger.commit()
    ledger.check()
    later = EpochLedger(ledger.sizes, [7])
    later.load_state_dict(ledger.state_dict())
    assert later.lease(7, 3) == (2, 3)
    later.check()
    assert (ledger.used_samples, ledger.committed_samples) == (4, 4)
