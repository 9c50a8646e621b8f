"""The ledger goes on from what was settled, whenever it was asked."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.batch_ranges import BatchSizes
from elche.coordination.ledger import EpochLedger
from elche.errors import ProtocolError, TransitionError

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
                "leave out",
                "reject",
                "revoke",
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
    elif what == "reject" and ledger.parts(holder):
        start, stop = ledger.parts(holder)[most % len(ledger.parts(holder))]
        ledger.reject(holder, [(start + (most > 2 and stop > start + 1), stop)])
        ledger.check()
    elif what == "revoke" and ledger._committed:
        start, stop = ledger._committed[most % len(ledger._committed)]
        before = ledger.committed_samples
        gone = ledger.revoke(holder, [(start + (most > 2 and stop > start + 1), stop)])
        assert ledger.committed_samples == before - gone
        ledger.check()
    elif what == "leave out" and ledger.pooled:
        start, _ = ledger.pooled_ranges()[0]
        ledger.leave_out(start, start + 1)


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


def test_nobody_takes_back_what_it_has_not_closed() -> None:
    ledger = EpochLedger(BatchSizes(((4, 3),)), [0])
    ledger.lease(0, 3)
    ledger.train(0, 0, 2)
    ledger.close(0)
    with pytest.raises(
        ProtocolError, match=r"takes back batches 1\.\.2, but has closed"
    ):
        ledger.reject(0, [(1, 3)])
    with pytest.raises(ProtocolError, match=r"back batches 0\.\.1, but committed are"):
        ledger.revoke(0, [(0, 2)])
    ledger.check()


def test_neighbours_are_taken_back_whatever_order_they_were_trained_in() -> None:
    """A batch that another rank gave back is trained on after the next one."""
    ledger = EpochLedger(BatchSizes(((4, 4),)), [0, 1])
    ledger.lease(1, 1)
    ledger.lease(0, 2)
    ledger.give_back(1)
    ledger.lease(0, 1)
    ledger.train(0, 1, 3)
    ledger.train(0, 0, 1)
    ledger.close(0)
    assert ledger.reject(0, [(0, 2)]) == ((0, 2),)
    assert ledger.parts(0) == ((2, 3),)
    assert ledger.pooled == 3
    ledger.check()
