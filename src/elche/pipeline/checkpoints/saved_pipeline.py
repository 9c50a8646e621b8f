"""A pipeline as `CheckpointKeeper` sees a run: where it stands, and agreement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, final

from elche.checkpoint.keeper import CheckpointKeeper
from elche.errors import ConfigError
from elche.pipeline.checkpoints.pipeline_contents import PipelineContents
from elche.pipeline.checkpoints.pipeline_state import PipelineState
from elche.runtime.report.notifications import RunNotifications


def begin_saving(pipe: PipelineState, keeper: CheckpointKeeper) -> None:
    """Has a pipeline's checkpoints made and resumed by the process's keeper."""
    keeper.begin_saved(
        SavedPipeline(pipe), lambda registered: PipelineContents(pipe, registered)
    )
    pipe.passes.pauses = keeper
    pipe.on_close = lambda failed: keeper.end_run(has_failed=failed)


@final
class SavedPipeline:
    """One rank's part in the checkpoints of a pipeline.

    Args:
        pipe: its state.
    """

    can_cut = True

    def __init__(self, pipe: PipelineState) -> None:
        self.rank, self.world_size = pipe.rank, pipe.world_size
        self.timeout_s = pipe.timeout_s
        self.notifications = RunNotifications(self.rank)
        self.notifications.emit = lambda line: print(line, file=sys.stderr, flush=True)
        self._pipe = pipe

    @property
    def is_in_epoch(self) -> bool:
        """True if an epoch of `elche.epochs` has steps, and is not known to be over."""
        passes = self._pipe.passes
        return passes.is_open or (
            passes.pauses.counts_epochs and passes.steps_outside > 0
        )

    def check_cut(self) -> None:
        """Refuses a checkpoint where nobody knows what is left of the epoch.

        Raises:
            ConfigError: the loop is not over `Pipeline.batches`.
        """
        if not self._pipe.passes.is_open:
            raise ConfigError(
                "elche.save() inside this loop could not say what is left of the "
                "epoch: write `for batch in pipe.batches(loader)`, or leave saving to "
                "elche.save_every, or count epochs by yourself and register the count"
            )

    def agree(self, make: Callable[[], str], what: str) -> str:
        """Text of rank 0, on every rank; all call it between epochs or at a cut."""
        communicator = self._pipe.communicator
        found: str = communicator.agree(lambda: "" if self.rank else make(), what)[0]
        self._pipe.passes.steps_outside = 0
        return found

    def heeds_signals(self, heeds: bool) -> None:
        """Tells the launcher whether this rank ends by itself after a signal."""
        peers = self._pipe.communicator.peers
        if peers is not None:
            peers.heeds_signals(heeds)

    def described(self) -> dict[str, Any]:
        """Progress for a checkpoint's manifest."""
        return {"kind": "pipeline", "steps": self._pipe.stepping.steps}

    def resume(self, state: Mapping[str, Any], epochs: Mapping[str, Any]) -> None:
        """All has been taken up with the contents."""
