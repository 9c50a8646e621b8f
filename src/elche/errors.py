"""Every exception that elche raises on purpose, in one tree.

::

    ElcheError
    ├── ConfigError            a setting is wrong (also a ValueError)
    ├── MismatchError          ranks disagree about model, data or configuration
    │                          (also a RuntimeError)
    ├── CommunicationError     a collective or the control channel failed (also a
    │   │                      RuntimeError, which loops around torch catch)
    │   ├── DeadlineError      a wait reached its deadline
    │   └── RankLostError      a rank died where the others cannot continue without it
    ├── RemoteRankError        another rank failed; carries its traceback
    ├── AbortedError           `handle.abort()` has ended the training of this rank
    ├── NonFiniteError         a rank's update is not finite again, or the model is NaN
    ├── CheckpointError        a checkpoint cannot be written, or not be read
    ├── ContributionError      a pipeline lost a gradient, or counted it twice
    └── ProtocolError          an unexpected or unreadable message
        └── TransitionError    an impossible transition; carries the event log
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ElcheError(Exception):
    """Base class of everything that elche raises on purpose."""


class ConfigError(ElcheError, ValueError):
    """A setting or an argument is wrong; the message says what to write instead."""


class MismatchError(ElcheError, RuntimeError):
    """Ranks disagree about the model, the data or the configuration."""


class CommunicationError(ElcheError, RuntimeError):
    """A collective or the control channel failed."""


class NonFiniteError(ElcheError):
    """A rank's update was not finite twice in a row, or the model is lost.

    Attributes:
        rank: rank on which it happened.
        batches: (start, stop) ranges of the update's batches in the epoch.
        part: (start, stop) of the samples within a batch; () for whole batches.
        samples: dataset keys of these samples; empty in the coordinator.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        batches: Sequence[tuple[int, int]] = (),
        part: Sequence[int] = (),
        samples: Sequence[Any] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.batches = tuple(batches)
        self.part = tuple(part)
        self.samples = tuple(samples)


class AbortedError(ElcheError):
    """The training of this rank was aborted; others see a `RemoteRankError`."""


class CheckpointError(ElcheError):
    """A checkpoint cannot be written, is damaged, or is of another version."""


class ContributionError(ElcheError):
    """A parameter's gradient was lost, or counted twice: do not apply the step."""


class DeadlineError(CommunicationError):
    """A wait reached its deadline; the message names the missing ranks."""


class RankLostError(CommunicationError):
    """A rank died at a point where the others cannot continue without it."""


class RemoteRankError(ElcheError):
    """Another rank failed and ended the run.

    Attributes:
        failed_rank: the rank that failed, or None when the coordinator did.
        remote_traceback: that rank's traceback as text, empty if it left none.
    """

    def __init__(
        self, message: str, failed_rank: int | None = None, remote_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.failed_rank = failed_rank
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        text = super().__str__()
        if not self.remote_traceback:
            return text
        return f"{text}\n--- traceback of rank {self.failed_rank} ---\n" + (
            self.remote_traceback.rstrip()
        )


class ProtocolError(ElcheError):
    """A message that is unexpected now, or that cannot be read."""


class TransitionError(ProtocolError):
    """An impossible transition of the coordination core; carries the event log."""

    def __init__(self, message: str, story: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.story = tuple(story)

    def __str__(self) -> str:
        text = super().__str__()
        if not self.story:
            return text
        return text + "\nstory:\n" + "\n".join(f"  {line}" for line in self.story)


def named_ranks(ranks: Sequence[int]) -> str:
    """Formats ranks for a message, as in "rank 3" and "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
