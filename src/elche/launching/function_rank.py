"""One rank of `elche.launch`, in a process of its own that runs a function."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from io import FileIO, TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from elche.devices import choice
from elche.errors import ConfigError
from elche.runtime.process.launchers import launch_facts
from elche.session.process import shutdown
from elche.session.ranks import rank


def run_rank(
    main: Callable[..., Any],
    args: tuple[Any, ...],
    environment: Mapping[str, str],
    result: Path,
    output: Connection | None,
) -> NoReturn:
    """Calls ``main`` in a rank's process, with the exit hooks of a normal process.

    The file ``result`` receives value, error and traceback, pickled.
    """
    _begin_rank(environment, output)
    if _is_fork() and _wants_accelerator():
        main = partial(call_in_fork, main)
    code, message = call_as_rank(main, args, pickle.dumps)
    result.write_bytes(message)
    sys.exit(code)


def call_as_rank(
    main: Callable[..., Any], args: tuple[Any, ...], dumps: Callable[[Any], bytes]
) -> tuple[int, bytes]:
    """Calls a function as the whole program of a rank.

    Args:
        main: the function.
        args: its arguments.
        dumps: pickles what it returns.

    Returns:
        The exit code; value, error and traceback, pickled.
    """
    code = 0
    try:
        value = main(*args)
        message = dumps((value if rank() == 0 else None, "", ""))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        message = dumps((None, f"SystemExit: {ended.code}" if code else "", ""))
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)  # notifies the others
        summary = traceback.format_exception_only(error)[-1].strip()
        text = "".join(traceback.format_exception(error))
        message = dumps((None, summary, text))
    atexit._run_exitfuncs()  # multiprocessing skips them
    return code, message


def _begin_rank(environment: Mapping[str, str], output: Connection | None) -> None:
    """Sets up a multiprocessing process like one that `elche run` starts."""
    is_fork = _is_fork()
    if is_fork:
        atexit._clear()  # of the notebook
        sys.excepthook = sys.__excepthook__
        shutdown()  # the notebook's own run
    if is_fork or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if is_fork else int(environment["OMP_NUM_THREADS"]))
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.environ.clear()
    os.environ.update(environment)
    facts = replace(launch_facts(environment), pipe=parent.sentinel)
    os.environ.update(facts.environment())
    if output is not None:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        sys.stdout, sys.stderr = (
            TextIOWrapper(FileIO(number, "w", closefd=False), line_buffering=True)
            for number in (1, 2)
        )


def _is_fork() -> bool:
    """True if this process is the fork of a notebook."""
    return multiprocessing.get_start_method() == "fork"


def _wants_accelerator() -> bool:
    if "ELCHE_SPEED" in os.environ or os.environ.get("ELCHE_DEVICE") == "cpu":
        return False
    return choice.count() > 0


def call_in_fork(main: Callable[..., Any], *args: Any) -> Any:
    """Calls ``main``, unless the fork's parent has used the accelerator.

    Raises:
        ConfigError: the parent has used it; the message names the remedy.
    """
    try:
        choice.start()
    except RuntimeError as error:
        raise ConfigError(
            f"{choice.kind()} was used in this notebook before elche.launch, and its "
            "forks cannot use it any more: restart the kernel and leave it alone "
            "before, or write main to a file (%%writefile train.py) and import it "
            f"({error})"
        ) from error
    return main(*args)
