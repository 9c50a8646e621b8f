"""Background thread of encoded exchanges: encoding, decoding, error feedback.

Encoding, decoding and error feedback are elementwise work on host memory. torch lets go
of the interpreter while it computes, so a second thread does it while the training
thread computes or waits for its device. One thread serves all exchanges of a group. It
never waits in gloo, where nothing could wake it: it looks whether a message has come,
and whoever has to wait does that on the training thread.
"""

from __future__ import annotations

import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Protocol, final

import torch

from elche.comm.transport.process_group import Group


class BackgroundTask(Protocol):
    """Work that a `CodecThread` does for an object."""

    def drive(self) -> float | None:
        """Does what can be done without waiting for other ranks.

        Returns:
            Seconds after which it is worth asking again; None: not before it is served
            again.
        """


@final
class CodecThread:
    """Drives exchanges; begins with the first that is served.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._served: SimpleQueue[BackgroundTask | None] = SimpleQueue()
        # Read and written by the training thread only.
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def serve(self, task: BackgroundTask) -> None:
        """The task has something to do; does not wait.

        After :meth:`end` it is not done here.
        """
        if self._has_ended:
            return
        self._served.put(task)
        if self._thread is None:
            self._begin()

    def end(self) -> None:
        """Ends the thread, and waits for what it is computing."""
        self._has_ended = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._served.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _begin(self) -> None:
        is_set = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(is_set,), name=self._name, daemon=True
        )
        thread.start()
        self._thread = thread
        is_set.wait()
        # What a thread sets is also where threads begin that come after it.
        torch.set_num_threads(torch.get_num_threads())

    def _run(self, is_set: threading.Event) -> None:
        try:
            torch.set_num_threads(1)  # the others belong to the training thread
        finally:
            is_set.set()
        pauses_s: dict[BackgroundTask, float] = {}
        while self._drive(pauses_s):
            pass

    def _drive(self, pauses_s: dict[BackgroundTask, float]) -> bool:
        """Waits for a task, and drives it; False after :meth:`end`.

        What is done is not held while it waits: a message takes as much as the model.
        """
        try:
            served = self._served.get(timeout=min(pauses_s.values(), default=None))
            if served is None:
                return False
            pauses_s[served] = 0.0
        except Empty:
            pass
        for each in tuple(pauses_s):
            pause_s = each.drive()
            if pause_s is None:
                del pauses_s[each]
            else:
                pauses_s[each] = pause_s
        return True


_threads: weakref.WeakKeyDictionary[Group, CodecThread] = weakref.WeakKeyDictionary()


def codec_thread_of(group: Group) -> CodecThread:
    """The group's thread; it ends with the group."""
    made = _threads.get(group)
    if made is None:
        made = _threads[group] = CodecThread(f"elche codec of rank {group.rank}")
        group.at_close(made.end)
        weakref.finalize(group, made.end)  # one of the user's is closed by nobody here
    return made
