"""The batch at fault is found among suspects."""

from __future__ import annotations

from elche.runtime.suspects import Suspects
from elche.runtime.window_sync import WindowSync


class Learned(WindowSync):
    """What a rank has learned, finite or not as a test says."""

    extra_bytes = 0
    is_finite = True
    has_finite_gradients = True

    def rebase(self) -> None: ...


def train(
    suspects: Suspects, learned: Learned, batch: int, *, model: bool, gradients: bool
) -> None:
    suspects.begin(batch)
    learned.is_finite, learned.has_finite_gradients = model, gradients
    suspects.done(batch)


def test_the_first_batch_that_leaves_no_number_is_at_fault() -> None:
    learned = Learned()
    suspects = Suspects(learned)
    suspects.add([(1, 3)])
    train(suspects, learned, 0, model=True, gradients=True)
    train(suspects, learned, 1, model=True, gradients=True)
    train(suspects, learned, 7, model=False, gradients=False)
    train(suspects, learned, 2, model=False, gradients=False)
    assert suspects.window_ends() == 7
    assert suspects.window_ends() is None


def test_a_suspect_is_not_at_fault_for_what_came_before_it() -> None:
    learned = Learned()
    suspects = Suspects(learned)
    suspects.add([(1, 2)])
    train(suspects, learned, 0, model=False, gradients=False)
    train(suspects, learned, 1, model=False, gradients=False)
    assert suspects.window_ends() is None


def test_a_gradient_that_waits_for_its_step_names_its_own_batch() -> None:
    learned = Learned()
    suspects = Suspects(learned)
    suspects.add([(0, 4)])
    train(suspects, learned, 0, model=True, gradients=False)  # skipped by a scaler
    train(suspects, learned, 1, model=True, gradients=True)
    train(suspects, learned, 2, model=True, gradients=False)
    train(suspects, learned, 3, model=False, gradients=False)
    assert suspects.window_ends() == 2
