"""Observers of a rank's training loop, attached and detached together."""

from __future__ import annotations

from functools import partial
from typing import Any, final

from elche.coordination.accounts.step_count import StepCount
from elche.coordination.protocol.messages import Scalars
from elche.runtime.process.worker import Worker
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.training import Training
from elche.runtime.watch.batch_state import BatchStateWatch
from elche.runtime.watch.followed_schedulers import FollowedSchedulers, mean_of
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.loss_reduction import MeanHints, SumLossWatch
from elche.runtime.watch.optimizers_seen import OptimizersSeen
from elche.runtime.watch.scaler_skips import ScalerSkips
from elche.runtime.watch.step_guard import StepGuard
from elche.runtime.windows.model_copies import ModelCopies
from elche.runtime.windows.synchroniser import Synchroniser


@final
class RankWatch:
    """What is seen of how a rank trains.

    Args:
        worker: this rank's shell.
        training: what is trained.
        notifications: what the loop logs, and what it is told.

    Attributes:
        steps: of the run.
        skips: steps that a GradScaler skips.
        optimizers: which step the model.
        copies: of the model, that the loop keeps.
        graphs: whose backward pass has not come.
        guard: asks at every step whether its gradients were reduced.
        schedulers: those that were handed over.
        batch_state: what cannot be carried to another rank.
        unstepped: batches with a backward pass since the last optimizer step.
    """

    def __init__(
        self,
        worker: Worker,
        training: Training,
        notifications: RunNotifications,
    ) -> None:
        config, model = training.config, training.model
        self._policy = config.policy
        self._refuses_sums = config.loss_reduction == "mean"
        self._sum_loss: SumLossWatch | None = None
        is_mean = training.weights is None and self._refuses_sums
        self._hints = MeanHints(lambda line: notifications.emit(line), is_on=is_mean)
        self._scalars = scalars = notifications.scalars
        self.steps = StepCount()
        self.skips = ScalerSkips(training.optimizer, scalars)
        self.optimizers = OptimizersSeen(model, training.optimizers)
        self.copies = ModelCopies(model, training.copies)
        self.graphs = LiveGraph(model)
        self.guard = StepGuard(self.steps)
        self.schedulers = FollowedSchedulers(
            config.policy, partial(mean_of, worker), self.steps
        )
        self._stepped = self.unstepped = 0
        self._passed: Any = None
        self.batch_state = BatchStateWatch(
            model, self.optimizers, self.skips, self.copies, self.schedulers
        )

    def attach(self, synchroniser: Synchroniser) -> None:
        """Begins to see optimizers, and copies where windows run or may."""
        self.guard.synchroniser = synchroniser
        self.optimizers.attach(self.guard.check)
        if self._policy != "sync":
            self.copies.attach()

    def begin_part(self) -> None:
        """Refuses a loss that is a sum: of a part of the batch it is another one."""
        sync, self.guard.is_inside = self.guard.synchroniser, True
        if self._refuses_sums and self._sum_loss is None:
            self._hints.is_on &= sync.windows is None or sync.windows.is_common_step
            trained = [p for p in sync.parameters if p.requires_grad]
            self._sum_loss = SumLossWatch(trained, self._hints.look)

    def begin_batch(self, batch: Any, samples: int) -> None:
        """The loop gets a batch of its share, of so many samples."""
        self.batch_done()
        self.steps.taken += 1
        self._hints.begin(batch, samples)

    def batch_done(self) -> None:
        """Counts batches that were passed back through since the last step."""
        stepped, passed = self.guard.stepped, self.graphs.last_passed
        if stepped != self._stepped:
            self._stepped, self.unstepped = stepped, 0
        elif stepped and passed not in (None, self._passed):
            self.unstepped += 1
        self._passed = passed

    def drain_scalars(self, final: bool) -> Scalars:
        """What the loop has logged since this was called last; True waits for all."""
        self.skips.settle()
        return self._scalars.drain(final=final)

    def detach(self) -> None:
        """Ends all of it: no other epoch follows."""
        self.graphs.forget()
        if self._sum_loss is not None:
            self._sum_loss.detach()
        self.skips.detach()
        self.optimizers.detach()
        self.schedulers.detach()
        self.copies.detach()
