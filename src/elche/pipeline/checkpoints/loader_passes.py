"""Passes over the user's loader, inside which checkpoints of a pipeline are made."""

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
    """One rank's passes, one after the other.

    A resumed pass draws its order as it was drawn before, from the random generators as
    they were at its begin, and drops the batches that are done.

    Attributes:
        pauses: when a pass is to be interrupted, and what is done then.
        is_open: whether the loop is inside one.
        is_cut_agreed: whether all ranks know that this pass is to be interrupted.
        done: batches of the pass that are done.
        steps_outside: training steps outside of passes, in the epoch under way.
        begun: the random generators when it began; None outside.
    """

    def __init__(self) -> None:
        self.pauses = Pauses()
        self.is_open = self.is_cut_agreed = False
        self.done = self.steps_outside = 0
        self.begun: dict[str, Any] | None = None
        self._generators: dict[str, torch.Generator] = {}
        self._resumed: tuple[dict[str, Any] | None, dict[str, Any]] | None = None

    def random(self) -> dict[str, Any]:
        """The random generators as they are, those of the last loader among them."""
        return random_state(self._generators)

    def resume(
        self, done: int, begun: dict[str, Any] | None, random: dict[str, Any]
    ) -> None:
        """Has the next pass go on where a checkpoint was made.

        Args:
            done: batches of it that are done.
            begun: the random generators when it began; None for a new pass.
            random: as they were at the checkpoint.
        """
        self.done, self._resumed = done, (begun, random)
        restore_random(random, {})

    def step_done(self, wants_cut: bool) -> None:
        """A training step has ended.

        Args:
            wants_cut: what rank 0 has said to all ranks with it.
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
