"""The thread beside the training thread: what it drives, and that it ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from elche.comm.codec.codec_thread import CodecThread, codec_thread_of
from elche.comm.transport.process_group import Group

DEADLINE_S = 60.0


class Counted:
    """Has something to be done for it so many times."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.threads: set[threading.Thread] = set()
        self.torch_threads = 0
        self.is_done = threading.Event()

    def drive(self) -> float | None:
        self.threads.add(threading.current_thread())
        self.torch_threads = torch.get_num_threads()
        self.left -= 1
        if self.left > 0:
            return 0.001
        self.is_done.set()
        return None


@pytest.fixture
def beside() -> Iterator[CodecThread]:
    made = CodecThread("a test's thread")
    yield made
    made.end()


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_one_thread_drives_all_until_there_is_nothing_to_do(
    beside: CodecThread,
) -> None:
    some = [Counted(times) for times in (1, 5, 20)]
    for each in some:
        beside.serve(each)
    for each in some:
        assert each.is_done.wait(DEADLINE_S)
        assert each.left == 0
    some[0].is_done.clear()
    some[0].left = 2
    beside.serve(some[0])  # there is something again
    assert some[0].is_done.wait(DEADLINE_S)
    threads = {thread for each in some for thread in each.threads}
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_it_begins_when_it_is_needed_and_ends_when_it_is_told(
    beside: CodecThread,
) -> None:
    assert "a test's thread" not in alive()
    forever = Counted(1_000_000)
    beside.serve(forever)
    assert "a test's thread" in alive()
    beside.end()
    assert "a test's thread" not in alive()
    beside.end()
    late = Counted(1)
    beside.serve(late)
    assert "a test's thread" not in alive()
    assert late.left == 1


def test_what_is_done_is_not_held(beside: CodecThread) -> None:
    """The messages of a model that is averaged no more, say."""
    counted, is_freed = Counted(1), threading.Event()
    held = weakref.ref(counted, lambda _: is_freed.set())
    beside.serve(counted)
    assert counted.is_done.wait(DEADLINE_S)
    del counted
    assert is_freed.wait(DEADLINE_S)
    assert held() is None


def test_a_thread_that_did_not_start_is_not_waited_for(
    beside: CodecThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        beside.serve(Counted(1))
    beside.end()


def test_it_computes_on_one_core_and_changes_nobody_elses(
    beside: CodecThread,
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        counted = Counted(1)
        beside.serve(counted)
        assert counted.is_done.wait(DEADLINE_S)
        assert counted.torch_threads == 1
        assert torch.get_num_threads() == 3
        found: list[int] = []
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == [3]
    finally:
        torch.set_num_threads(before)


def test_it_ends_with_its_group() -> None:
    group = Group(None, 3, 5, 1.0)
    made = codec_thread_of(group)
    assert codec_thread_of(group) is made
    made.serve(Counted(1_000_000))
    assert "elche codec of rank 3" in alive()
    group.close()
    assert "elche codec of rank 3" not in alive()
