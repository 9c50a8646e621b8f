"""Ranks that are started once per world size and serve many distributed cases.

Ranks are forked from a server that has imported torch and elche, and run nothing: a
new interpreter would pay 4 s of a processor for that, rank by rank. A case is a
module-level function; every rank of the pool calls it with the same arguments, and
`this_place()` tells it which rank it is.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import connection as mp_connection
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, final, overload
from weakref import WeakSet

from typing_extensions import Self

from tests.harness.rank_main import Place, Task, resolve, serve
from tests.harness.rank_process import Outcome, RankCaseFailed, RankProcess
from tests.harness.serving import serve_in_thread

PRELOADED = ["torch._dynamo", "elche.session.setup"]
"""Imported once, in the server; none of them starts a thread or asks for a device."""

Environment: TypeAlias = Mapping[str, str | None]
CaseSetup: TypeAlias = Callable[
    [int], AbstractContextManager[Sequence[Mapping[str, str]]]
]
T = TypeVar("T")


@final
class RankPool:
    """`world_size` processes that run the same case together.

    They start on the first `run`. When a rank dies, hangs or fails unexpectedly, all
    are killed, and the next `run` starts new ones.

    Args:
        world_size: how many ranks.
        failure_grace_s: how long the others may go on after one rank has failed, where
            failure is not expected: they often wait for it until the deadline.
    """

    def __init__(self, world_size: int, failure_grace_s: float = 10.0) -> None:
        self.world_size = world_size
        self._failure_grace_s = failure_grace_s
        self._ranks: list[RankProcess] = []
        self._log_folder: Path | None = None
        _pools.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ends = self.close()
        if kind is None and any(end.error for end in ends):
            raise RankCaseFailed("ranks did not exit cleanly", ends)

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids in rank order; empty when none runs."""
        return [rank.process.pid or 0 for rank in self._ranks]

    @overload
    def run(
        self,
        case: Callable[..., T],
        *args: Any,
        env: Sequence[Environment] | None = ...,
        timeout_s: float = ...,
        case_setup: CaseSetup | None = ...,
        expect_failure: Literal[False] = ...,
        **kwargs: Any,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        env: Sequence[Environment] | None = ...,
        timeout_s: float = ...,
        case_setup: CaseSetup | None = ...,
        expect_failure: Literal[True],
        **kwargs: Any,
    ) -> list[Outcome]: ...

    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        env: Sequence[Environment] | None = None,
        timeout_s: float = 240.0,
        case_setup: CaseSetup | None = None,
        expect_failure: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `case(*args, **kwargs)` on every rank and collects what it returns.

        Args:
            case: a module-level function; it, its arguments and results must pickle.
            args: its positional arguments, the same on every rank.
            env: per rank, environment variables for this case; None unsets one.
            timeout_s: when a rank that is not through counts as hung.
            case_setup: given the world size, a context that yields an environment per
                rank (of a coordinator that serves this case, say) and is left when all
                ranks are through. `env` overrides it.
            expect_failure: return an `Outcome` per rank, whatever it is; the survivors
                of a failure may then use the whole `timeout_s`.
            kwargs: its keyword arguments.

        Returns:
            The values in rank order, or the outcomes where failure is expected.

        Raises:
            RankCaseFailed: when a rank raised, died or hung and that is not expected.
            ValueError: when the ranks could not import `case`.
        """
        module, qualname = _import_path(case)
        setup = case_setup(self.world_size) if case_setup else nullcontext(None)
        with setup as prepared:
            environments = self._merged(prepared, env)
            self._start()
            for rank, environment in zip(self._ranks, environments, strict=True):
                rank.send(Task(module, qualname, args, kwargs, environment))
            outcomes = self._collect(timeout_s, expect_failure)
        if expect_failure:
            return outcomes
        if any(outcome.error for outcome in outcomes):
            raise RankCaseFailed(f"{module}.{qualname} failed", outcomes)
        return [outcome.value for outcome in outcomes]

    def serve(self, case: Callable[..., T], *args: Any, **more: Any) -> list[T]:
        """As `run`, with a coordinator in a thread of this process."""
        return self.run(case, *args, case_setup=serve_in_thread, **more)

    def close(self) -> list[Outcome]:
        """Ends the idle ranks.

        Returns:
            How each ended; an exit code that is not zero is an error.
        """
        ends = [rank.finish() for rank in self._ranks]
        self._ranks = []
        if self._log_folder is not None:
            shutil.rmtree(self._log_folder, ignore_errors=True)
            self._log_folder = None
        return ends

    def _start(self) -> None:
        if self._ranks and all(rank.process.is_alive() for rank in self._ranks):
            return
        self._kill()
        if self._log_folder is None:
            self._log_folder = Path(tempfile.mkdtemp(prefix="elche-ranks-"))
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for index in range(self.world_size):
            place = Place(index, self.world_size)
            log_path = self._log_folder / f"rank{index}.log"
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(place, theirs, str(log_path)), name=f"rank{index}"
            )
            process.start()
            theirs.close()
            self._ranks.append(RankProcess(place, process, ours, log_path))

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks = []

    def _merged(
        self, prepared: Sequence[Environment] | None, env: Sequence[Environment] | None
    ) -> list[Environment]:
        merged: list[dict[str, str | None]] = [{} for _ in range(self.world_size)]
        for given in (prepared, env):
            if given is None:
                continue
            if len(given) != self.world_size:
                raise ValueError(
                    f"expected one environment per rank ({self.world_size}), "
                    f"got {len(given)}"
                )
            for target, changes in zip(merged, given, strict=True):
                target.update(changes)
        return list(merged)

    def _collect(self, timeout_s: float, expect_failure: bool) -> list[Outcome]:
        started_s = time.monotonic()
        deadline_s = started_s + timeout_s
        outcomes: dict[int, Outcome] = {}
        waiting = list(self._ranks)
        try:
            while waiting and (left_s := deadline_s - time.monotonic()) > 0:
                mp_connection.wait(
                    [r.connection for r in waiting]
                    + [r.process.sentinel for r in waiting],
                    left_s,
                )
                for rank in list(waiting):
                    if (outcome := rank.poll()) is None:
                        continue
                    outcomes[rank.place.rank] = outcome
                    waiting.remove(rank)
                    if outcome.error and not expect_failure:
                        grace_s = time.monotonic() + self._failure_grace_s
                        deadline_s = min(deadline_s, grace_s)
            waited_s = time.monotonic() - started_s
            for rank in waiting:
                outcomes[rank.place.rank] = rank.abort(_reason(waited_s, outcomes))
        except BaseException:
            self._kill()  # interrupted: the ranks are in the middle of the case
            raise
        errors = [outcome.error for outcome in outcomes.values() if outcome.error]
        if errors and (not expect_failure or any(e.way != "raised" for e in errors)):
            self._kill()  # what a failed case leaves behind fails the next one
        return [outcomes[index] for index in range(self.world_size)]


_pools: WeakSet[RankPool] = WeakSet()


def renew_pools() -> None:
    """Ends the idle ranks of all pools; the next case of each starts new ones."""
    for pool in _pools:
        pool.close()


def pool_pids() -> frozenset[int]:
    """Returns the processes of all pools: they may outlive a test."""
    return frozenset(pid for pool in _pools for pid in pool.pids)


def _reason(waited_s: float, outcomes: Mapping[int, Outcome]) -> str:
    failed = [rank for rank, outcome in outcomes.items() if outcome.error]
    after = f"; ranks {failed} had failed before" if failed else ""
    return f"not through after {waited_s:.1f} s and killed{after}"


def _import_path(case: Callable[..., Any]) -> tuple[str, str]:
    module = getattr(case, "__module__", "")
    qualname = getattr(case, "__qualname__", "")
    try:
        found = resolve(module, qualname)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not case:
        raise ValueError(
            f"expected a function that ranks can import, got {case!r}; define it at "
            "the top of a module and pass what it needs as arguments"
        )
    return module, qualname
