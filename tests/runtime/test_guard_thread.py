"""The thread that asks the user's guard."""

from __future__ import annotations

import threading

import pytest

from elche.errors import DeadlineError
from elche.runtime.guard_thread import GuardThread


def test_one_thread_answers_all_questions() -> None:
    thread = GuardThread()
    names = {thread.ask(threading.get_ident, 60.0) for _ in range(3)}
    assert len(names) == 1
    assert names != {threading.get_ident()}
    thread.close()
    assert thread.ask(lambda: 3, 60.0) == 3
    thread.close()


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, TimeoutError])
def test_what_a_question_raises_is_raised_here(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("as I said")

    thread = GuardThread()
    with pytest.raises(kind, match="as I said"):
        thread.ask(fail, 60.0)
    thread.close()


def test_a_question_without_an_answer_is_given_up() -> None:
    release, thread = threading.Event(), GuardThread()
    with pytest.raises(DeadlineError, match=r"no answer came within 0\.01 s"):
        thread.ask(release.wait, 0.01)
    assert thread.ask(lambda: 3, 60.0) == 3
    release.set()
    thread.close()
