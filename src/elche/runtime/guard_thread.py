"""A thread that asks the user's guard, so that whoever waits for it may give up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import final

from elche.errors import DeadlineError

Question = Callable[[], object]


@final
class GuardThread:
    """One thread for all questions, started with the first: guards may be bound to it.

    A daemon: a guard that never answers keeps no process alive.
    """

    def __init__(self) -> None:
        self._questions: SimpleQueue[tuple[Question, Future[object]] | None] | None = (
            None
        )

    def ask(self, question: Question, within_s: float) -> object:
        """What the question returns, or raises, in the thread.

        An answer that is there when the deadline is noticed counts.

        Raises:
            DeadlineError: it took longer than ``within_s``; the thread is given up.
        """
        if self._questions is None:
            self._questions = SimpleQueue()
            threading.Thread(
                target=_answer,
                args=(self._questions,),
                name="elche-guard",
                daemon=True,
            ).start()
        answer: Future[object] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(within_s)
        except FutureTimeoutError:
            if not answer.cancel():  # it has come just now, or this is the guard's own
                return answer.result()
            self.close()
            raise DeadlineError(f"no answer came within {within_s:g} s") from None

    def close(self) -> None:
        """Ends the thread when it has answered; the next question starts another."""
        questions, self._questions = self._questions, None
        if questions is not None:
            questions.put(None)


def _answer(questions: SimpleQueue[tuple[Question, Future[object]] | None]) -> None:
    while (asked := questions.get()) is not None:
        question, answer = asked
        try:
            told, error = question(), None
        except BaseException as raised:
            told, error = None, raised
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            if error is None:
                answer.set_result(told)
            else:
                answer.set_exception(error)
