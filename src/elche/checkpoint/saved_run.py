"""Interfaces of runs to checkpoints: `elche.setup`, single device, pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elche.checkpoint.capture import Captured
from elche.checkpoint.store import Checkpoint
from elche.runtime.report.notifications import RunNotifications


class SavedContents(Protocol):
    """Interface to the objects whose state a checkpoint holds; see `Contents`."""

    def capture(self, loop: Mapping[str, int]) -> Captured:
        """Copies all state; a collective call."""

    def load(self, found: Checkpoint) -> dict[str, Any]:
        """Loads a checkpoint into the objects; returns the shared state."""


class SavedRun(Protocol):
    """Interface of a run to checkpoints; `Run`, `SingleRun` and pipelines have it."""

    @property
    def rank(self) -> int:
        """Index of this rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""

    @property
    def timeout_s(self) -> float:
        """Deadline (s) of waits for other ranks."""

    @property
    def is_in_epoch(self) -> bool:
        """True within an epoch."""

    @property
    def can_cut(self) -> bool:
        """True if the current epoch can be interrupted."""

    @property
    def notifications(self) -> RunNotifications:
        """Channel of messages to the user."""

    def agree(self, make: Callable[[], str], what: str) -> str:
        """Broadcasts the text that rank 0 makes; returns it on every rank."""

    def heeds_signals(self, heeds: bool) -> None:
        """Notifies the launcher whether this rank exits by itself after a signal."""

    def check_cut(self) -> None:
        """Raises if the rest of the epoch is unknown, so no checkpoint can be made."""

    def described(self) -> dict[str, Any]:
        """Returns progress for the manifest, with samples or steps."""

    def resume(self, state: dict[str, Any], epochs: dict[str, Any]) -> None:
        """Continues from a checkpoint's state."""
