"""Passes over the user's loader, which checkpoints of a pipeline may interrupt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, final

import torch
from torch.utils.data import DataLoader

from elche.checkpoint.capture import random_state, restore_random
from elche.runtime.training import Pauses, generators_of

Batch = TypeVar("Batch")


@final
class LoaderPasses:
    """Tracks one rank's passes, one after another.

    A resumed pass restores the random generators of its start, so that it draws the
    same order, and skips the batches already done.

    Attributes:
        pauses: decides when a pass is interrupted, and runs the interruption.
        is_open: whether the loop is inside a pass.
        is_cut_agreed: whether all ranks have agreed to interrupt this pass.
        done: batches of the pass that are done.
        steps_outside: training steps of the current epoch outside of passes.
        begun: state of the random generators at the pass's start; None outside.
    """

    def __init__(self) -> None:
        self.pauses = Pauses()
        self.is_open = self.is_cut_agreed = False
        self.done = self.steps_outside = 0
        self.begun: dict[str, Any] | None = None
        self._generators: dict[str, torch.Generator] = {}
        self._resumed: tuple[dict[str, Any] | None, dict[str, Any]] | None = None

    def random(self) -> dict[str, Any]:
        """Current state of the random generators, including the last loader's."""
        return random_state(self._generators)

    def resume(
        self, done: int, begun: dict[str, Any] | None, random: dict[str, Any]
    ) -> None:
        """Makes the next pass continue at a checkpoint.

        Args:
            done: batches of the pass that are done.
            begun: state of the random generators at its start; None for a new pass.
            random: state of the random generators at the checkpoint.
        """
        self.done, self._resumed = done, (begun, random)
        restore_random(random, {})

    def step_done(self, wants_cut: bool) -> None:
        """Counts a finished training step.

        Args:
            wants_cut: rank 0's broadcast decision to interrupt the pass.
        """
        self.steps_outside += not self.is_open
        self.is_cut_agreed = wants_cut

    def over(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the remaining batches of a pass; see `Pipeline.batches`."""
        if not self.pauses.begin_pass():
            return
        is_torch = isinstance(loader, DataLoader)
        self._generators = generators_of(loader) if is_torch else {}  # type: ignore[arg-type]
        batches = self._resumed_batches(loader)
        self.is_open = True
        try:
            for batch in batches:
                yield batch
                self.done += 1
                if self.is_cut_agreed:
                    self.is_cut_agreed = False
                    self.pauses.cut(is_end=False)
        finally:
            self.is_open, self.begun, self.done = False, None, 0

    def _resumed_batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        resumed, self._resumed = self._resumed, None
        begun, random = resumed or (None, None)
        if random is not None:
            now = random_state({})
            restore_random(begun or random, self._generators)
            if begun is None:
                restore_random(now, {})
        self.begun = self.random()
        batches = iter(loader)
        for _ in range(self.done):
            next(batches, None)
        if random is not None and begun is not None:
            restore_random(random, self._generators)
        return batches
