"""What runs in a rank of a `RankPool`: cases, one after the other.

Torch is imported already, by the server that the rank was forked from.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

from tests.harness import leaks

PR_SET_PDEATHSIG = 1
LEAK_GRACE_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where a case runs.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: how many ranks run the case.
    """

    rank: int
    world_size: int


@dataclass(frozen=True)
class Task:
    """A case to run: the import path of a function and what it is called with."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    environment: Mapping[str, str | None]


_place: Place | None = None


def this_place() -> Place:
    """Returns the rank and world size of the pool that runs the calling case.

    Raises:
        RuntimeError: when called outside a rank of a pool.
    """
    if _place is None:
        raise RuntimeError("expected to run in a rank of a RankPool; use pool.run()")
    return _place


def serve(place: Place, connection: Connection, log_path: str) -> None:
    """Runs the tasks that `connection` brings until it brings None or closes.

    Args:
        place: which rank this is.
        connection: brings a pickled Task, takes a pickled (succeeded, payload): what
            the case returned, or its traceback.
        log_path: gets all output, and the stacks when this process is aborted.
    """
    global _place
    _place = place
    _prepare_process(log_path)
    gc.freeze()  # no collection need look at what the server has imported
    while (task := _next_task(connection)) is not None:
        reply = _run(task)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(reply)
    atexit._run_exitfuncs()  # a process of a fork server ends without


def resolve(module: str, qualname: str) -> Callable[..., Any]:
    """Returns the function that stands at an import path."""
    found = reduce(getattr, qualname.split("."), importlib.import_module(module))
    assert callable(found), f"{module}.{qualname} is not callable"
    return found


def _prepare_process(log_path: str) -> None:
    log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    faulthandler.enable(sys.stderr)
    # The pool aborts a rank that hangs: its stacks are wanted, a core dump is not.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform.startswith("linux"):
        # As in a user's script: what is spawned hands its own way on, and a loader's
        # workers would each import torch.
        multiprocessing.set_start_method("fork", force=True)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ["OMP_NUM_THREADS"] = "1"


def _next_task(connection: Connection) -> Task | None:
    try:
        task = pickle.loads(connection.recv_bytes())
    except EOFError:
        return None
    assert task is None or isinstance(task, Task)
    return task


def _run(task: Task) -> bytes:
    try:
        before = leaks.snapshot()
        with _environment(task.environment), _fresh_torch():
            value = resolve(task.module, task.qualname)(*task.args, **task.kwargs)
        reply = pickle.dumps((True, value))
        del value
        if left := leaks.leaks_since(before, LEAK_GRACE_S):
            raise AssertionError("the case left behind:\n" + "\n".join(left))
        return reply
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    before = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _fresh_torch() -> Iterator[None]:
    """Makes a case independent of those before it, and refuses that it leaves a group.

    Raises:
        AssertionError: when the case ended well and left torch's default group.
    """
    import torch
    from torch import distributed
    from torch.utils.data import _utils

    # Of a loader in a cycle the collector ends workers, to which no word comes then.
    _utils.MP_STATUS_CHECK_INTERVAL = 0.5
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
        assert not distributed.is_initialized(), (
            "the case left torch's default process group; call destroy_process_group()"
        )
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
