"""Communication of a pipeline's ranks: exchange, agreement, common failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar, final

from elche.errors import (
    CommunicationError,
    ConfigError,
    DeadlineError,
    MismatchError,
)
from elche.pipeline.peers.peers import StagePeers
from elche.pipeline.replicas.replica_groups import ReplicaGroups
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.step.executor import StepResults

T = TypeVar("T")


class _RepeatCall(Exception):  # noqa: N818
    """A replica is lost, and no rank has finished the call: all repeat it."""


@final
class PipelineCommunicator:
    """Exchange and agreement with the other ranks; a failure ends all of them.

    In a single-rank run every call returns at once.

    Args:
        rank: this rank.
        peers: connections to the other ranks; None without other ranks.
        timeout_s: deadline (s) of waits outside steps.

    Attributes:
        rebuild: called after a replica is lost, with the surviving ranks' former
            numbers; None if a loss ends the run.
    """

    def __init__(self, rank: int, peers: StagePeers | None, timeout_s: float) -> None:
        self.peers = peers
        self.rank = rank
        self._timeout_s = timeout_s
        self._ended = ""
        self._calls, self._is_repeated, self._last = 0, False, list[Any]()
        self.rebuild: Callable[[Sequence[int]], None] | None = None

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Sends a value to all ranks; returns all values in rank order."""
        self.check_open()
        if self.peers is None:
            return [value]
        try:
            found = self.peers.exchange(value, self._timeout_s, what)
        except CommunicationError as error:
            if (last := self._survive(error)) is None:
                raise _RepeatCall from error
            return last
        except Exception as error:
            self.fail(error)
            raise
        self._last = found
        return found

    def surviving(self, call: Callable[[], T]) -> T:
        """Executes a call of all ranks; repeats it after each loss of a replica.

        A call ends with an exchange. If another rank has the result, every rank has
        done its part, and this rank copies the result. Otherwise no rank has finished
        the call, and all repeat it.
        """
        while True:
            self._is_repeated = self.rebuild is not None
            try:
                found = call()
                self._calls += 1
                return found
            except _RepeatCall:
                continue
            except CommunicationError as error:
                last = self._survive(error)
                assert last is None, "a rank has ended the call without this one"
            finally:
                self._is_repeated = False

    def _survive(self, error: CommunicationError) -> list[Any] | None:
        """Reconnects the surviving ranks after a loss, if the run survives it.

        Returns the result of the call's last exchange if another rank has finished the
        call; otherwise the call is repeated.
        """
        is_repeated, self._is_repeated = self._is_repeated, False
        with self.ending_on_failure():
            if not is_repeated or isinstance(error, DeadlineError) or not self.peers:
                raise error
            if self._ended or not self.peers.awaits_loss():
                raise error
            last = self._last
            self.peers, kept = self.peers.rejoin(self._timeout_s)
            self.rank = self.peers.rank
            what = "the calls that have ended"
            reports = self.peers.exchange([self._calls, last], self._timeout_s, what)
            assert self.rebuild is not None, "set before a call is repeated"
            self.rebuild(kept)
        calls, last = max(reports, key=lambda report: int(report[0]))
        return last if calls > self._calls else None

    def check_open(self) -> None:
        """Raises if the pipeline is no longer usable.

        Raises:
            CommunicationError: the pipeline was closed or has failed.
        """
        if self._ended:
            raise CommunicationError(f"{self._ended}; make another Pipeline")

    @contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """Context in which an exception ends the pipeline on all ranks.

        A single-rank run does not end: its next call may succeed.
        """
        try:
            yield
        except Exception as error:
            is_survivable = self._is_repeated and isinstance(error, CommunicationError)
            is_final = not (is_survivable or isinstance(error, _RepeatCall))
            if is_final and self.peers is not None:
                self.fail(error)
            raise

    @contextmanager
    def closing_on_failure(self) -> Iterator[None]:
        """Context for exceptions that all ranks raise equally; closes on exception."""
        try:
            yield
        except Exception:
            self.close()
            raise

    def fail(self, error: BaseException) -> None:
        """Ends the pipeline on all ranks, with this error as the reason."""
        if not self._ended:
            self._ended = f"the pipeline has ended ({type(error).__name__}: {error})"
        if self.peers is not None:
            self.peers.fail(error)

    def close(self) -> None:
        """Closes this rank's connections."""
        self._ended = self._ended or "the pipeline is closed"
        if self.peers is not None:
            self.peers.close()

    def gather(self, make: Callable[[], Any], what: str) -> list[Any]:
        """Sends the result of `make` to all ranks; returns all results in rank order.

        msgpack must be able to encode the result; `what` names the call in errors.

        Raises:
            ConfigError: another rank failed; errors of this rank's `make` are raised as
                they are. The pipeline has ended.
        """
        with self.closing_on_failure():
            return self.agree(make, what)

    def agree(
        self, make: Callable[[], Any], what: str, begins: bool = False
    ) -> list[Any]:
        """Like `gather`, but leaves the pipeline open after an error.

        With `begins`, at the start of a call, all ranks raise the first ConfigError
        unchanged. Otherwise errors name their rank.

        Raises:
            ConfigError: as in `gather`.
            MismatchError: ranks call different methods.
        """
        made, raised, error = None, None, ""
        try:
            made = make()
        except Exception as problem:
            raised, error = problem, f"{type(problem).__name__}: {problem}"
            if begins and isinstance(problem, ConfigError):
                raised, error = None, str(problem) or error
        wait = f"the begin of {what}" if begins else what
        reports = self.exchange([what, error, made], wait)
        if any(one[0] != what for one in reports):
            calls = ", ".join(f"rank {r}: {one[0]}" for r, one in enumerate(reports))
            raise MismatchError(f"ranks call different methods: {calls}")
        if raised is not None:
            raise raised
        for rank, (_, text, _) in enumerate(reports):
            if text:
                by = "" if begins else f"rank {rank} failed in {what}: "
                raise ConfigError(f"{by}{text}")
        return [value for _, _, value in reports]

    def build(self, build: Callable[[], Parts], groups: ReplicaGroups) -> Parts:
        """Builds on every rank; if one fails or they differ, all ranks raise.

        Each replica may have its own schedule.

        Raises:
            ConfigError: a rank cannot build its stages.
            MismatchError: the ranks' parts do not match.
        """
        if self.peers is None:
            return build()
        made: list[Parts] = []

        def describe() -> list[tuple[str, str]]:
            made.append(build())
            return made[0].describe()

        with self.closing_on_failure():
            described = self.agree(describe, "building the stages")
            for rank in range(len(described)):
                _compare(described, rank, groups)
            placement, given = made[0].plan.schedule.placement, made[0].given
            edges = [{*pair} for pair in pairwise(placement) if self.rank in pair]
            partners = frozenset[int]().union(*edges) - {self.rank}
            if given.config.transport != "gloo":
                self.peers.open_devices(given.device, partners, self._timeout_s)
        return made[0]

    def run(
        self,
        carry_out: Callable[[], StepResults],
        wants_cut: Callable[[], bool] = lambda: False,
    ) -> tuple[StepResults, list[list[float]], bool]:
        """Executes a step; afterwards every rank knows that all ranks have succeeded.

        Returns:
            This rank's results, each rank's microbatch losses, and rank 0's result of
            `wants_cut`, which is called after `carry_out`.

        Raises:
            RemoteRankError: another rank failed; errors of this rank are raised as they
                are. The pipeline has ended.
            CommunicationError: a rank has disconnected or is late; the pipeline has
                ended.
        """
        with self.ending_on_failure():
            results = carry_out()
            mine = [float(results.losses[index]) for index in sorted(results.losses)]
            reports = self.exchange([mine, wants_cut()], "the end of the step")
        return results, [losses for losses, _ in reports], reports[0][1]


def common(by_rank: Sequence[T], name: str) -> T:
    """Returns the value that all ranks have.

    Raises:
        MismatchError: ranks have different values.
    """
    if any(one != by_rank[0] for one in by_rank):
        raise MismatchError(
            f"expected one {name} on all ranks, got {list(by_rank)} by rank; run the "
            "same script with the same settings everywhere"
        )
    return by_rank[0]


def _compare(described: Sequence[Any], rank: int, groups: ReplicaGroups) -> None:
    own = groups.ranks[groups.replica_of(rank)]
    for name, theirs in described[rank]:
        first = 0 if name == "the settings" else own[0]  # replicas share the settings
        mine = dict(described[first]).get(name, "nothing")
        if mine != theirs:
            raise MismatchError(
                f"ranks disagree about {name}: rank {first} has {mine}, rank {rank} "
                f"has {theirs}; run the same script with the same settings everywhere"
            )
