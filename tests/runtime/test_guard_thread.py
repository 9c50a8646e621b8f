"""The thread that asks the user's guard."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from elche.errors import DeadlineError
from elche.runtime import guard_thread
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


def test_a_question_without_an_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread ends, without a word, when it answers after all."""
    release, thread = threading.Event(), GuardThread()
    died: list[object] = []
    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading, "excepthook", died.append)

    def hang() -> None:
        threads.append(threading.current_thread())
        release.wait()

    with pytest.raises(DeadlineError, match=r"no answer came within 0\.01 s"):
        thread.ask(hang, 0.01)
    assert thread.ask(lambda: 3, 60.0) == 3
    release.set()
    thread.close()
    for each in threads:
        each.join(60.0)
        assert not each.is_alive()
    assert not died


class LateToNotice(Future[object]):
    """Its waiter notices the deadline just after the answer has come."""

    def result(self, timeout: float | None = None) -> object:
        if timeout is not None:
            self.exception()
            raise FutureTimeoutError  # before Python 3.11 not the builtin
        return super().result()


def test_an_answer_at_the_deadline_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_thread, "Future", LateToNotice)
    thread = GuardThread()
    assert thread.ask(lambda: 3, 60.0) == 3
    with pytest.raises(ZeroDivisionError):
        thread.ask(lambda: 1 / 0, 60.0)
    with pytest.raises(TimeoutError, match="the guard's own"):
        thread.ask(_own_timeout, 60.0)
    thread.close()


def _own_timeout() -> None:
    raise TimeoutError("the guard's own")
