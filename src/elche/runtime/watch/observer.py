"""Observer of the user's loop, and the parts of which it consists.

==============  ===================================  =================================
event           seen by                              parts
==============  ===================================  =================================
forward pass    hooks of the model, inside epochs    `LiveGraph`
backward pass   hooks of its outputs and parameters  `LiveGraph`, `LossWatch`
optimizer step  a hook of every optimizer            `StepGuard`, `ScalerWatch`
next batch      the epoch                            all but the guard
==============  ===================================  =================================

An excluded rank, and one that joins, adopts model and optimizers. Other state that its
loop would have changed is not copied. So if such state is seen, no rank joins, and none
is excluded or returns (`STALE`: none returns).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.coordination.accounts.step_count import StepCount
from elche.coordination.sync.step_reports import (
    RATE_MOVES,
    SCALED,
    SCHEDULED,
    STALE,
    UNEVEN,
)
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.sync.resume_sync import plain_schedule
from elche.runtime.training import Training
from elche.runtime.watch.followed_schedulers import FollowedSchedulers
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.loss_reduction import LossWatch
from elche.runtime.watch.model_copies import ModelCopies
from elche.runtime.watch.rate_watch import is_scheduled
from elche.runtime.watch.scaler_watch import ScalerWatch
from elche.runtime.watch.step_guard import StepGuard
from elche.runtime.windows.synchroniser import Synchroniser

UNCOUNTED = "the loop may count steps (say epochs=, or use loader.steps(n))"


@final
class LoopObserver:
    """Observer of how one process trains, attached and detached once per run.

    Args:
        training: objects to train.
        notifications: receives what the loop logs, and lines for the user.
        mean: returns the mean of a number over all ranks; a collective.

    Attributes:
        scalars: log of the loop's scalars.
        guard: check of every optimizer step, where ranks reduce.
        optimizers: returns those that step the model, the given ones first.
        steps: count of the run's steps.
        scaler: steps that a GradScaler skips.
        copies: averages of the model that the loop keeps.
        graphs: forward passes whose backward pass has not come.
        schedulers: registered learning rate schedulers.
        unstepped: batches with a backward pass since the last optimizer step.
    """

    def __init__(
        self,
        training: Training,
        notifications: RunNotifications,
        mean: Callable[[float], float] = float,
    ) -> None:
        config, self._model = training.config, training.model
        self._policy = config.policy
        is_mean = config.loss_reduction == "mean"
        self._losses = LossWatch(
            lambda line: notifications.emit(line),
            refuses_sums=is_mean,
            is_on=is_mean and training.weights is None,
        )
        self.scalars = notifications.scalars
        self._steps_seen = self.unstepped = 0
        self._passed: Any = None
        self._is_uneven = self._has_sync_norms = False
        self._uncarried, self._may_count = "", True
        self.steps = StepCount()
        self.guard = StepGuard(self._model, training.optimizers, self.steps)
        self.optimizers = self.guard.optimizers
        self.scaler = ScalerWatch(training.optimizer, self.scalars)
        self.copies = ModelCopies(self._model, training.copies)
        self.graphs = LiveGraph(self._model)
        self.schedulers = FollowedSchedulers(config.policy, mean, self.steps)

    def attach(self, synchroniser: Synchroniser | None = None) -> None:
        """Starts watching optimizer steps, and copies where windows may run.

        Args:
            synchroniser: record of reduced gradients; None: no step is checked.
        """
        if synchroniser is not None:
            self.guard.synchroniser = synchroniser
            self.scaler.attach(lambda: _has_common_step(synchroniser))
            if self._policy != "sync":
                self.copies.attach()
        self.guard.attach()

    def begin_part(self, sync: Synchroniser, *, is_counted: bool) -> None:
        """Prepares for an epoch, or for the rest of it.

        Args:
            sync: holder of the trained parameters.
            is_counted: elche counts epochs or steps, and not the loop.
        """
        self._may_count = not is_counted
        self._has_sync_norms = bool(sync_batchnorm_layers(self._model))
        if is_counted:
            self.copies.attach()
        self.guard.begin_part()
        is_weighed = sync.windows is None or _has_common_step(sync)
        trained = (p for p in sync.parameters if p.requires_grad)
        self._losses.attach(trained, is_weighed=is_weighed)

    def begin_batch(self, batch: Any, samples: int) -> None:
        """Records the batch that the loop is about to receive."""
        sync = self.guard.synchroniser
        reducer = None if sync is None else sync.reducer
        if reducer is not None and reducer.backward_passes:
            self._is_uneven |= not self.guard.all_have_stepped
            self.guard.in_batch.clear()
        if self._policy != "sync":
            self.count_unstepped()
        self.steps.taken += 1
        self._losses.begin(batch, samples)

    def count_unstepped(self) -> None:
        """Counts batches with a backward pass since the last step."""
        stepped, passed = self.guard.stepped, self.graphs.last_passed
        if stepped != self._steps_seen:
            self._steps_seen, self.unstepped = stepped, 0
        elif stepped and passed not in (None, self._passed):
            self.unstepped += 1
        self._passed = passed

    def meets(self, call: str) -> None:
        """Records a call inside an epoch that all ranks must make."""
        self._uncarried = f"the loop calls {call}, which needs every rank"

    @property
    def carried_schedulers(self) -> list[LRScheduler]:
        """Registered schedulers whose state can be copied."""
        held = self.schedulers.schedulers
        return [each for each in held if plain_schedule(each) is not None]

    def uncarried(self) -> str:
        """First state, in words, that cannot be copied to an excluded rank; or "".

        State of `STALE` comes last: ranks may be excluded in spite of it.
        """
        if not self._uncarried or self._uncarried in STALE:
            self._uncarried = self._seen() or self._uncarried
        if self._may_count and self._uncarried in ("", *STALE):
            return UNCOUNTED
        return self._uncarried or (UNEVEN if self._is_uneven else "")

    def barred(self) -> str:
        """Reason why a rank that joins would take other steps; "" if there is none.

        The joining rank's loop counts batches from there on.
        """
        if self._is_uneven or not self.guard.all_have_stepped:
            return UNEVEN
        return self._uncarried or self._seen()

    def _seen(self) -> str:
        """State, in words, that moves with a rank's batches and cannot be copied."""
        if self.copies.has_unknown:
            return "elche does not know of the AveragedModel (copies=[...])"
        if self._has_sync_norms:
            return "SyncBatchNorm layers need every rank"
        if dist.is_available() and dist.is_initialized():
            return "the script has a process group of torch's"
        known = {id(each.optimizer) for each in self.carried_schedulers}
        optimizers = [o for o in self.optimizers() if id(o) not in known]
        if any(map(is_scheduled, optimizers)):
            return SCHEDULED
        if self.schedulers.rates.has_moved(optimizers):
            return RATE_MOVES
        return SCALED if self.scaler.has_scaler else ""

    def detach(self) -> None:
        """Removes every hook: no other epoch follows."""
        self.graphs.forget()
        self._losses.detach()
        self.scaler.detach()
        self.guard.detach()
        self.schedulers.detach()
        self.copies.detach()


def _has_common_step(synchroniser: Synchroniser) -> bool:
    """Returns True if a window's gradients are summed for one step of all ranks."""
    windows = synchroniser.windows
    return windows is not None and windows.is_common_step
