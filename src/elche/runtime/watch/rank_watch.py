"""Observers of a rank's training loop, attached and detached together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch

from elche.coordination.accounts.step_count import StepCount
from elche.coordination.protocol.messages import Scalars
from elche.runtime.process.worker import Worker
from elche.runtime.report.scalars import ScalarLog
from elche.runtime.training import Training
from elche.runtime.watch.batch_state import BatchStateWatch
from elche.runtime.watch.followed_schedulers import FollowedSchedulers, mean_of
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.loss_reduction import SumLossWatch
from elche.runtime.watch.optimizers_seen import OptimizersSeen
from elche.runtime.watch.scaler_skips import ScalerSkips
from elche.runtime.watch.trailing_step import TrailingSteps
from elche.runtime.windows.model_copies import ModelCopies


@final
class RankWatch:
    """What is seen of how a rank trains.

    Args:
        worker: this rank's shell.
        training: what is trained.
        scalars: what the loop logs.

    Attributes:
        steps: of the run.
        skips: steps that a GradScaler skips.
        optimizers: which step the model.
        copies: of the model, that the loop keeps.
        graphs: whose backward pass has not come.
        trailing: steps after an epoch of windows.
        schedulers: those that were handed over.
        batch_state: what cannot be carried to another rank.
    """

    def __init__(
        self,
        worker: Worker,
        training: Training,
        scalars: ScalarLog,
    ) -> None:
        config, model = training.config, training.model
        self._policy = config.policy
        self._refuses_sums = config.loss_reduction == "mean"
        self._sum_loss: SumLossWatch | None = None
        self._scalars = scalars
        self.steps = StepCount()
        self.skips = ScalerSkips(training.optimizer, scalars)
        self.optimizers = OptimizersSeen(model, training.optimizers)
        self.copies = ModelCopies(model, training.copies)
        self.graphs = LiveGraph(model)
        self.trailing = TrailingSteps(model)
        self.schedulers = FollowedSchedulers(
            config.policy, partial(mean_of, worker), self.steps
        )
        self.batch_state = BatchStateWatch(
            model, self.optimizers, self.skips, self.copies, self.schedulers
        )

    def attach(self) -> None:
        """Begins to see optimizers, and copies where windows run or may."""
        self.optimizers.attach()
        if self._policy != "sync":
            self.copies.attach()

    def watch_loss(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuses a loss that is a sum: of a part of the batch it is another one."""
        if self._refuses_sums and self._sum_loss is None:
            self._sum_loss = SumLossWatch([p for p in parameters if p.requires_grad])

    def drain_scalars(self, final: bool) -> Scalars:
        """What the loop has logged since this was called last; True waits for all."""
        self.skips.settle()
        return self._scalars.drain(final=final)

    def detach(self) -> None:
        """Ends all of it: no other epoch follows."""
        self.trailing.forget()
        self.graphs.forget()
        if self._sum_loss is not None:
            self._sum_loss.detach()
        self.skips.detach()
        self.optimizers.detach()
        self.schedulers.detach()
        self.copies.detach()
