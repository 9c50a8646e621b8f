"""Runs as checkpoints see them: of `elche.setup`, of one device, of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elche.checkpoint.capture import Captured
from elche.checkpoint.store import Checkpoint
from elche.runtime.report.notifications import RunNotifications


class SavedContents(Protocol):
    """The objects whose state a checkpoint is, as `Contents` and a pipeline's."""

    def capture(self, loop: Mapping[str, int]) -> Captured:
        """Copies of everything; with all ranks."""

    def load(self, found: Checkpoint) -> dict[str, Any]:
        """Puts a checkpoint into them; returns what all ranks held in common."""


class SavedRun(Protocol):
    """Interface of a run to checkpoints; `Run`, `SingleRun` and pipelines have it."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def world_size(self) -> int:
        """Ranks of the run."""

    @property
    def timeout_s(self) -> float:
        """Deadline of waits."""

    @property
    def is_in_epoch(self) -> bool:
        """True if an epoch is under way."""

    @property
    def can_cut(self) -> bool:
        """True if it can be interrupted."""

    @property
    def notifications(self) -> RunNotifications:
        """Lines for the user."""

    def agree(self, make: Callable[[], str], what: str) -> str:
        """The text that rank 0 makes, on every rank."""

    def heeds_signals(self, heeds: bool) -> None:
        """Tells the launcher whether this rank ends by itself after a signal."""

    def check_cut(self) -> None:
        """Refuses a checkpoint where the rest of the epoch is unknown."""

    def described(self) -> dict[str, Any]:
        """Progress for the manifest: samples or steps among it."""

    def resume(self, state: dict[str, Any], epochs: dict[str, Any]) -> None:
        """Goes on from a checkpoint's state."""
