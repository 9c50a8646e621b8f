"""What the ranks of a pipeline do together: build, begin a step, end it, or fail."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from elche.errors import (
    CommunicationError,
    ConfigError,
    MismatchError,
    RemoteRankError,
)
from elche.pipeline.assembly import Parts
from elche.pipeline.executor import (
    PeerFailedError,
    StepInput,
    StepResults,
    failure_of,
)
from elche.pipeline.peers import Peers


@final
class Crew:
    """This rank with the others, or alone.

    Args:
        rank: this rank.
        peers: the others; None where there are none.
        timeout_s: deadline of waits outside steps.
    """

    def __init__(self, rank: int, peers: Peers | None, timeout_s: float) -> None:
        self.peers = peers
        self._rank = rank
        self._timeout_s = timeout_s
        if peers is not None:
            _leave_at_exit(peers)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Gives a value to all ranks, and gets theirs, in rank order."""
        if self.peers is None:
            return [value]
        with self.ending_on_failure():
            return self.peers.exchange(value, self._timeout_s, what)

    @contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """Messages that fail end the pipeline on all ranks."""
        try:
            yield
        except Exception as error:
            if self.peers is not None:
                self.peers.fail(error)
            raise

    def close(self) -> None:
        """Leaves."""
        if self.peers is not None:
            self.peers.close()

    def gather(self, make: Callable[[], Any], what: str) -> list[Any]:
        """Gives what this rank makes to all ranks, and gets theirs, in rank order.

        Args:
            make: its result can be sent on the control channel.
            what: for people.

        Raises:
            ConfigError: another rank could not; what `make` raises is raised here.
        """
        made, raised, error = None, None, ""
        try:
            made = make()
        except Exception as problem:
            raised, error = problem, f"{type(problem).__name__}: {problem}"
        told = self.exchange([error, made], what)
        try:
            if raised is not None:
                raise raised
            for rank, (text, _) in enumerate(told):
                if text:
                    raise ConfigError(f"rank {rank} failed in {what}: {text}")
        except Exception:
            self.close()
            raise
        return [value for _, value in told]

    def build(self, build: Callable[[], Parts]) -> Parts:
        """Builds on every rank, and raises on all if one cannot, or they differ.

        Raises:
            ConfigError: a rank cannot build its stages.
            MismatchError: they do not go together.
        """
        if self.peers is None:
            return build()
        parts, raised, error = None, None, ""
        try:
            parts = build()
        except Exception as problem:
            raised, error = problem, f"{type(problem).__name__}: {problem}"
        told = self.exchange(
            [error, parts.describe() if parts else None], "building the stages"
        )
        try:
            if raised is not None:
                raise raised
            for rank, (text, _) in enumerate(told):
                if text:
                    raise ConfigError(f"rank {rank} cannot build its stages: {text}")
            for rank, (_, described) in enumerate(told):
                _compare(told[0][1], described, rank)
        except Exception:
            self.close()
            raise
        assert parts is not None
        return parts

    def begin(
        self, what: str, samples: int | None, targets: int | None, error: str, form: str
    ) -> tuple[int, int | None, str]:
        """All ranks begin the same thing.

        Args:
            what: name of the method.
            samples: of the batch, on the rank that reads it.
            targets: samples of the target, on the rank that reads it.
            error: what is wrong here, "" if nothing is.
            form: shapes of the batch, on the rank that reads it.

        Returns:
            Samples of batch and target, and the batch's shapes.

        Raises:
            ConfigError: something is wrong on a rank.
            MismatchError: ranks call different methods.
        """
        said = [what, samples, targets, error, form]
        told = self.exchange(said, f"the begin of {what}")
        errors = [one[3] for one in told if one[3]]
        if errors:
            raise ConfigError(errors[0])
        if any(one[0] != what for one in told):
            calls = ", ".join(f"rank {r}: {one[0]}" for r, one in enumerate(told))
            raise MismatchError(f"ranks call different methods: {calls}")
        total = next(one[1] for one in told if one[1] is not None)
        labelled = next((one[2] for one in told if one[2] is not None), None)
        return total, labelled, next((one[4] for one in told if one[4]), "")

    def run(
        self, carry_out: Callable[[StepInput], StepResults], given: StepInput
    ) -> tuple[StepResults, list[float]]:
        """Carries out a step; every rank then knows whether all ranks could.

        Returns:
            This rank's results, and the losses of the microbatches.

        Raises:
            RemoteRankError: another rank failed; what this rank's own work raises is
                raised here.
            CommunicationError: a rank is gone, or late; the pipeline has ended.
        """
        if self.peers is None:
            results = carry_out(given)
            return results, _losses(results)
        results, failure, raised = StepResults(), None, None
        with self.ending_on_failure():
            try:
                results = carry_out(given)
            except (CommunicationError, RemoteRankError):
                raise
            except Exception as error:
                found = failure_of(self._rank, error)
                failure = [found.rank, found.text, found.traceback]
                raised = error
            told = self.peers.exchange(
                [failure, _losses(results)], given.timeout_s, "the end of the step"
            )
        if raised is not None and not isinstance(raised, PeerFailedError):
            raise raised
        for told_failure, _ in told:
            if told_failure is not None:
                rank, text, trace = told_failure
                raise RemoteRankError(f"rank {rank} failed: {text}", rank, trace)
        return results, next((one[1] for one in told if one[1]), [])


def _losses(results: StepResults) -> list[float]:
    return [float(results.losses[index]) for index in sorted(results.losses)]


def _compare(first: Any, other: Any, rank: int) -> None:
    for (name, mine), (_, theirs) in zip(first, other, strict=True):
        if mine != theirs:
            raise MismatchError(
                f"ranks disagree about {name}: rank 0 has {mine}, rank {rank} has "
                f"{theirs}; run the same script with the same settings everywhere"
            )


def _leave_at_exit(peers: Peers) -> None:
    """The group of gloo aborts the interpreter's exit if a group is left open."""
    held = weakref.ref(peers)

    def leave() -> None:
        found = held()
        if found is not None:
            found.close()

    atexit.register(leave)
