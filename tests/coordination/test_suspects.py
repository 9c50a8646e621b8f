"""The batch at fault is found among suspects, and the rest of a window kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.suspects import Suspects


class Loop:
    """A loop that steps every so many batches, and what it has learned.

    Attributes:
        model: batches that steps were taken along.
        gradients: batches whose gradients wait for a step.
        taken_back: batches that are in neither any more.
    """

    def __init__(self, bad: set[int], accumulated: int = 1) -> None:
        self._bad = bad
        self._accumulated = accumulated
        self._count = 0
        self._kept: set[int] | None = None
        self.model: set[int] = set()
        self.gradients: list[int] = []
        self.taken_back = 0
        self.has_stepped = False
        self.looks = 0

    @property
    def is_finite(self) -> bool:
        self.looks += 1
        return not self.model & self._bad

    @property
    def has_finite_gradients(self) -> bool:
        return not set(self.gradients) & self._bad

    @property
    def accumulates(self) -> bool:
        return self._accumulated > 1

    def keep(self) -> None:
        self._kept = set(self.model)

    def restore(self, batches: int) -> None:
        assert self._kept is not None
        self.model = set(self._kept)
        self.drop_gradients(batches)

    def drop_gradients(self, batches: int) -> None:
        self.gradients = []
        self.taken_back += batches

    def forget(self) -> None:
        self._kept = None

    @property
    def is_keeping(self) -> bool:
        return self._kept is not None

    def train(self, batch: int) -> None:
        self._count += 1
        self.gradients.append(batch)
        self.has_stepped = self._count % self._accumulated == 0
        if self.has_stepped:
            self.model.update(self.gradients)
            self.gradients = []


def batches_of(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    return {batch for part in ranges for batch in range(*part)}


def run(suspects: Suspects, loop: Loop, *batches: int) -> None:
    for batch in batches:
        suspects.begin(batch)
        loop.train(batch)
        suspects.done(batch)


def test_whoever_leaves_no_number_is_taken_back_and_the_others_stay() -> None:
    loop = Loop({7, 3})
    suspects = Suspects(loop)
    suspects.add([(1, 2)])
    run(suspects, loop, 0, 1, 7, 2, 3, 4)
    assert loop.model == {0, 1, 2, 4}
    assert suspects.window_ends() == ((7, 3), ((3, 4), (7, 8)))
    suspects.closed(is_finite=True)
    assert suspects.window_ends() == ((), ())


def test_a_suspect_is_not_at_fault_for_what_came_before_it() -> None:
    loop = Loop({0})
    suspects = Suspects(loop)
    suspects.add([(1, 2)])
    run(suspects, loop, 0, 1)
    assert suspects.window_ends() == ((), ())


def test_a_gradient_that_waits_for_its_step_names_its_own_batch() -> None:
    """All batches of that step go back, as their gradients are one."""
    loop = Loop({2}, accumulated=4)
    suspects = Suspects(loop)
    suspects.add([(0, 4)])
    run(suspects, loop, 0, 1, 2, 3, 4)
    assert loop.gradients == [4]
    assert suspects.window_ends() == ((2,), ((0, 4),))


def test_gradients_do_not_carry_what_is_none_over_a_windows_end() -> None:
    loop = Loop({5}, accumulated=4)
    suspects = Suspects(loop)
    run(suspects, loop, 0, 1, 2, 3, 4, 5)
    assert suspects.window_ends() == ((), ((4, 6),))
    assert suspects.closed(is_finite=loop.is_finite) == ()
    run(suspects, loop, 6, 7)  # the step of 4 to 7 is one of 6 and 7
    assert loop.model == {0, 1, 2, 3, 6, 7}
    run(suspects, loop, 8, 5)  # watched, as the window before was spoilt
    assert suspects.window_ends() == ((5,), ((5, 6), (8, 9)))


def test_what_waited_over_a_windows_end_is_given_back_with_its_step() -> None:
    # Once: 2 and 3 counted as trained on, and were in no step.
    for is_suspect in (False, True):
        loop = Loop({5}, accumulated=4)
        suspects = Suspects(loop)
        suspects.add([(5, 6)] if is_suspect else [])
        run(suspects, loop, 2, 3)
        assert suspects.window_ends() == ((), ())
        assert suspects.closed(is_finite=loop.is_finite) == ()
        run(suspects, loop, 4, 5, 6)
        expected = ((5,), ((4, 6),)) if is_suspect else ((), ())
        assert suspects.window_ends() == expected
        assert suspects.closed(is_finite=loop.is_finite) == ((2, 4),)


def test_what_a_mean_has_brought_is_not_taken_back() -> None:
    loop = Loop({3})
    suspects = Suspects(loop)
    suspects.add([(1, 2)])
    run(suspects, loop, 1)
    loop.model.add(100)
    suspects.adopted()
    run(suspects, loop, 3)
    assert loop.model == {1, 100}


@given(st.data())
def test_every_batch_is_learned_or_goes_back(data: st.DataObject) -> None:
    """Whatever is bad, suspect, accumulated, and wherever windows end."""
    windows = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    bad = data.draw(st.sets(st.integers(0, 47)))
    accumulated = data.draw(st.integers(1, 5))
    loop = Loop(bad, accumulated)
    suspects = Suspects(loop)
    for start in data.draw(st.sets(st.integers(0, 47))):
        suspects.add([(start, start + 1)])
    learned: set[int] = set()
    taken_back, first = 0, 0
    for size in windows:
        was_wary, carried = suspects._is_wary, set(loop.gradients)
        before = learned | carried
        batches = range(first, first + size)
        run(suspects, loop, *batches)
        first += size
        culprits, rejected = suspects.window_ends()
        gone = batches_of(rejected)
        assert gone <= set(batches)
        assert set(culprits) <= gone & bad
        is_finite = loop.is_finite
        lost = batches_of(suspects.closed(is_finite=is_finite))
        if not is_finite:  # the shell takes the whole window back
            assert not was_wary or carried & bad
            assert lost == carried
            loop.model, loop.gradients = set(learned), []
            loop.taken_back = taken_back
            continue
        assert loop.taken_back == taken_back + len(gone)
        taken_back = loop.taken_back
        # A step that this window did not begin gives back what came before it, too.
        assert lost <= carried
        held = loop.model | set(loop.gradients)
        assert held == (before | set(batches)) - gone - lost
        assert not held & bad
        assert not loop.is_keeping or rejected
        learned = set(loop.model)


def test_a_run_without_suspects_looks_at_nothing() -> None:
    loop = Loop(set())
    suspects = Suspects(loop)
    run(suspects, loop, *range(20))
    assert suspects.window_ends() == ((), ())
    assert not loop.looks
