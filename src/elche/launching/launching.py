"""`elche.launch`: a function run by every rank, from a script or a notebook.

A function that a fresh process can import is run in one. A notebook's own functions
cannot be imported, so its ranks are forks of it, as in other notebook launchers. A fork
cannot use an accelerator if its parent did. It uses one OpenMP thread: more would hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

from elche.devices import choice
from elche.errors import ConfigError, RemoteRankError
from elche.launching.function_rank import run_rank
from elche.monitor.page.beside import new_folder, page_beside
from elche.runtime.process.launch import LaunchedRun
from elche.runtime.process.launch import launch as launch_ranks
from elche.runtime.process.launch_config import LaunchConfig, LaunchResult
from elche.runtime.process.rank_processes import RankProcess

Result = TypeVar("Result")

OUTPUT_BYTES = 1 << 16
LOOK_S = 0.02
"""Poll interval (s) of the ranks' output."""
PROCESS = "elche-rank-"
"""Name of a rank's process, before its number."""


class Returned(NamedTuple):
    """Return value of a rank's function, or the error that ended it."""

    value: Any = None
    error: str = ""
    traceback: str = ""


def launch(
    main: Callable[..., Result],
    devices: int | Sequence[str] | None = None,
    *,
    args: Sequence[Any] = (),
    speeds: Sequence[float] | None = None,
    events: str | Path | None = None,
    page: bool | str = False,
) -> Result:
    """Runs ``main(*args)`` on every rank of a run, and returns what rank 0 returns.

    From a script (under ``if __name__ == "__main__":``), a notebook or standard input
    (``python - < script.py``, with the limits of a notebook). Each rank is a
    process, as under ``elche run``; `elche.setup` and all else of elche work in it. A
    rank's output appears here. Ctrl-C, or a notebook's interrupt, ends all ranks.

    In a script or module, define ``main`` at the top level and give picklable ``args``.
    A notebook's own functions need neither, but its ranks are forked: an accelerator
    must not have been used in the notebook before, and ranks on the CPU compute with
    one thread each. A ``main`` imported from a file has neither limit.

    Rank 0's return value is pickled; the other ranks' values are dropped. If rank 0
    died and the others continued, the next rank's value is returned. Move tensors to
    the CPU first.

    Args:
        main: function that each rank runs.
        devices: number of ranks, or a device for each, such as ``["cuda:0", "cpu"]``;
            None for every accelerator, or one rank on the CPU.
        args: arguments of ``main``.
        speeds: relative speeds of emulated CPU devices, in place of ``devices``.
        events: folder for the run's event file, written while it runs.
        page: show the run in a browser, and print the page's address; or ``HOST:PORT``
            to listen on. Without ``events`` its folder is a new one in elche_runs.

    Raises:
        ConfigError: an argument is wrong, ``main`` cannot be sent to another process,
            or this is a rank of a run already.
        RemoteRankError: the rank that failed first, its error and its traceback.
        KeyboardInterrupt: on Ctrl-C, when all ranks have ended.
    """
    _check_place()
    if not callable(main):
        raise ConfigError(f"expected main to be a function, got {main!r}")
    if speeds is not None and devices is not None:
        raise ConfigError("expected devices or speeds, got both")
    if isinstance(devices, str) or [] in (devices, speeds):
        raise ConfigError(f"expected devices or speeds, got {devices or []!r}")
    ranks = FunctionRanks(main, tuple(args))
    if speeds is not None:
        place: dict[str, Any] = {"speeds": tuple(speeds)}
    elif devices is None:
        place = {"num_ranks": choice.count() or 1}
    elif isinstance(devices, int):
        place = {"num_ranks": devices}
    else:
        place = {"devices": tuple(devices)}
    if events is None and page:
        events = new_folder(sys.argv[0])
    place["events"] = None if events is None else Path(events)
    with contextlib.ExitStack() as stack:
        if page:
            at = page if isinstance(page, str) else ""
            stack.enter_context(page_beside(place["events"], at, print))
        result: Result = ranks.run(LaunchConfig(command=(), start=ranks.start, **place))
    return result


@final
class FunctionRanks:
    """Processes of one `launch` call, their output and return values.

    Args:
        main: function that each rank runs.
        args: its arguments.
    """

    def __init__(self, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._main = main
        self._args = args
        kind = "fork" if _has_no_file(main) else "spawn"
        self._context: Any = multiprocessing.get_context(kind)
        self._folder = ""
        self._output: tuple[Connection, Connection] | None = None
        self._ready = threading.Event()
        self._run: LaunchedRun | None = None

    def run(self, config: LaunchConfig) -> Any:
        """Starts the ranks in a thread, since a notebook's event loop runs in this one.

        Raises:
            RemoteRankError: a rank failed.
        """
        if sys.stdout is not sys.__stdout__:  # a notebook shows what is written there
            self._output = self._context.Pipe(duplex=False)
        launched: Future[LaunchResult] = Future()
        # No ThreadPoolExecutor: a fork of its thread would wait for itself at its end.
        launching = threading.Thread(
            target=self._launch, args=(config, launched), name="elche-launch"
        )
        was_interrupted = False
        with tempfile.TemporaryDirectory(prefix="elche-") as self._folder:
            launching.start()
            while launching.is_alive():
                try:
                    if not self._show():
                        launching.join(LOOK_S)
                except KeyboardInterrupt:
                    was_interrupted = True
                    self._interrupt()
            while self._show():
                pass
            for end in self._output or ():
                end.close()
            result = launched.result()
            if was_interrupted:
                raise KeyboardInterrupt
            return value_of(result, self._message)

    def _launch(self, config: LaunchConfig, launched: Future[LaunchResult]) -> None:
        try:
            launched.set_result(launch_ranks(config, self._set_ready))
        except BaseException as error:  # raised in the thread that called
            launched.set_exception(error)
        self._ready.set()

    def start(self, rank: int, environment: Mapping[str, str]) -> RankProcess:
        """Starts a rank; see `LaunchConfig.start`."""
        output = None if self._output is None else self._output[1]
        process = self._context.Process(
            target=run_rank,
            args=(self._main, self._args, dict(environment), self._file(rank), output),
            name=f"{PROCESS}{rank}",
        )
        with warnings.catch_warnings():
            # Python warns of forks beside threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                process.start()
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise ConfigError(
                    "main and args cannot be sent to another process: "
                    f"{error}; define main at the top level of a module, and give it "
                    "arguments that can be pickled"
                ) from error
        return FunctionProcess(process)

    def _set_ready(self, run: LaunchedRun) -> None:
        self._run = run
        self._ready.set()

    def _interrupt(self) -> None:
        self._ready.wait()
        if self._run is not None:
            self._run.interrupt(signal.SIGINT)

    def _show(self) -> bool:
        """Copies ranks' new output to this process; returns False if there is none."""
        if self._output is None or not self._output[0].poll():
            return False
        text = os.read(self._output[0].fileno(), OUTPUT_BYTES)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
        return True

    def _file(self, rank: int) -> Path:
        return Path(self._folder, f"{rank}.pickle")

    def _message(self, rank: int) -> bytes:
        file = self._file(rank)
        return file.read_bytes() if file.exists() else b""


@final
class FunctionProcess:
    """Adapter of a multiprocessing process to the launcher's `RankProcess`.

    Args:
        process: process that has been started.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        """See `RankProcess`."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """See `RankProcess`."""
        return self._process.exitcode

    def send_signal(self, signal: int, /) -> None:
        """See `RankProcess`."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal)

    async def wait(self) -> int:
        """See `RankProcess`."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        await ended.wait()
        loop.remove_reader(self._process.sentinel)
        self._process.join()
        return self._process.exitcode or 0


def value_of(result: LaunchResult, message_of: Callable[[int], bytes]) -> Any:
    """Return value of the first rank that ended well.

    Args:
        result: result of the run.
        message_of: returns a rank's pickled `Returned`; empty if it has sent none.

    Raises:
        RemoteRankError: a rank failed.
    """
    if (failed := result.failed_first) is not None:
        found, code = _returned(message_of(failed)), result.exit_codes[failed]
        error = found.error or f"its process ended with code {code}"
        text = f"rank {failed} failed: {error}"
        raise RemoteRankError(text, failed, found.traceback)
    return _returned(message_of(result.exit_codes.index(0))).value


def _returned(message: bytes) -> Returned:
    try:
        return Returned(*pickle.loads(message))
    except (EOFError, pickle.UnpicklingError):  # its process died
        return Returned()


def _check_place() -> None:
    """Refuses to start ranks from a process that is itself a rank."""
    if multiprocessing.current_process().name.startswith(PROCESS):
        raise ConfigError(
            "elche.launch is called while a rank imports this script; call it under "
            'if __name__ == "__main__":'
        )
    if "ELCHE_COORDINATOR" in os.environ or "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "this process is a rank of a run already (elche run, elche.launch or "
            "torchrun): call main() itself, or start the script with python"
        )


def _has_no_file(main: Callable[..., Any]) -> bool:
    """True if a fresh process could not import the function."""
    # "<stdin>" of `python - < script` names no file.
    file = getattr(sys.modules["__main__"], "__file__", "")
    return main.__module__ == "__main__" and not os.path.exists(file)
