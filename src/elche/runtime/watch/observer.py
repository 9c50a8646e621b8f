"""Observer of the user's loop: the hooks of a run, and the parts that they ask.

==============  ===================================  =================================
event           seen by                              parts
==============  ===================================  =================================
forward pass    hooks of the model, inside epochs    `LiveGraph`
backward pass   hooks of its outputs and parameters  `LiveGraph`, `SumLossWatch`
optimizer step  a hook of every optimizer            `StepGuard`, `ScalerWatch`
next batch      the epoch                            all but the guard
==============  ===================================  =================================
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elche.coordination.accounts.step_count import StepCount
from elche.coordination.protocol.messages import Scalars
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.training import Training
from elche.runtime.watch.carried_state import CarriedState
from elche.runtime.watch.followed_schedulers import FollowedSchedulers
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.loss_reduction import MeanHints, SumLossWatch
from elche.runtime.watch.model_copies import ModelCopies
from elche.runtime.watch.scaler_watch import ScalerWatch
from elche.runtime.watch.step_guard import StepGuard
from elche.runtime.windows.synchroniser import Synchroniser


@final
class SteppedOptimizers:
    """Optimizers that step a model.

    Args:
        model: what is trained.
        given: those that were handed over.

    Attributes:
        known: every one that has stepped, those of other models as well.
        in_batch: ids of those that have stepped in this batch.
    """

    def __init__(
        self, model: nn.Module, given: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._model = model
        self._given = list(given)
        self._others: list[weakref.ref[torch.optim.Optimizer]] = []
        self.known = weakref.WeakSet(self._given)
        self.in_batch: set[int] = set()

    def learn(self, optimizer: torch.optim.Optimizer) -> None:
        """One steps for the first time."""
        self.known.add(optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held.isdisjoint(map(id, self._model.parameters())):
            self._others.append(weakref.ref(optimizer))

    def all(self) -> list[torch.optim.Optimizer]:
        """The given ones, and those that are still there, in order of first steps."""
        if not self._others:
            return [*self._given]
        others = (ref() for ref in self._others)
        return [*self._given, *(each for each in others if each is not None)]


@final
class LoopObserver:
    """Observer of how one process trains, attached and detached once per run.

    Args:
        training: what is trained.
        notifications: receives what the loop logs, and lines for the user.
        mean: of a number over all ranks, with all of them.

    Attributes:
        optimizers: returns those that step the model, the given ones first.
        steps: count of the run's steps.
        scaler: steps that a GradScaler skips.
        copies: averages of the model that the loop keeps.
        graphs: forward passes whose backward pass has not come.
        guard: check of every optimizer step; asked where ranks reduce.
        schedulers: the learning rate schedulers that were handed over.
        carried: state that cannot be carried to another rank.
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
        self._refuses_sums = config.loss_reduction == "mean"
        self._sum_loss: SumLossWatch | None = None
        is_mean = training.weights is None and self._refuses_sums
        self._hints = MeanHints(lambda line: notifications.emit(line), is_on=is_mean)
        self._scalars = scalars = notifications.scalars
        self._stepped = SteppedOptimizers(self._model, training.optimizers)
        self._handle: Any = None
        self._steps_seen = self.unstepped = 0
        self._passed: Any = None
        self._is_guarded = self._is_uneven = False
        self.optimizers = self._stepped.all
        self.steps = StepCount()
        self.scaler = ScalerWatch(training.optimizer, scalars)
        self.copies = ModelCopies(self._model, training.copies)
        self.graphs = LiveGraph(self._model)
        self.guard = StepGuard(self.steps)
        self.schedulers = FollowedSchedulers(config.policy, mean, self.steps)
        self.carried = CarriedState(
            self._model, self.optimizers, self.scaler, self.copies, self.schedulers
        )

    def attach(self, synchroniser: Synchroniser | None = None) -> None:
        """Begins to see optimizer steps, and copies where windows run or may.

        Args:
            synchroniser: knows which gradients are reduced; None: no step is checked.
        """
        if synchroniser is not None:
            self.guard.synchroniser, self._is_guarded = synchroniser, True
            self.scaler.refuse_where(lambda: _has_common_step(synchroniser))
            self.scaler.attach()
            if self._policy != "sync":
                self.copies.attach()
        me = weakref.ref(self)

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            observer = me()
            if observer is None:
                return None
            return observer.before_step(optimizer, args, kwargs)

        self._handle = self._handle or register_optimizer_step_pre_hook(hook)

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> Any:
        """A hook before every optimizer step of the process.

        Raises:
            ConfigError: the step would not be that of the other ranks.
        """
        self._stepped.in_batch.add(id(optimizer))
        if optimizer not in self._stepped.known:
            self._stepped.learn(optimizer)
        if not self._is_guarded:
            return None
        return self.guard.check(optimizer, args, kwargs)

    def begin_part(self) -> None:
        """Refuses a loss that is a sum: of a part of the batch it is another one."""
        sync = self.guard.synchroniser
        self.guard.begin_part()
        if self._refuses_sums and self._sum_loss is None:
            self._hints.is_on &= sync.windows is None or _has_common_step(sync)
            trained = [p for p in sync.parameters if p.requires_grad]
            self._sum_loss = SumLossWatch(trained, self._hints.look)

    def begin_batch(self, batch: Any, samples: int) -> None:
        """The loop gets a batch of its share, of so many samples."""
        reducer = self.guard.synchroniser.reducer
        if reducer is not None and reducer.backward_passes:
            self._is_uneven |= not self._all_have_stepped
            self._stepped.in_batch.clear()
        if self._policy != "sync":
            self.count_unstepped()
        self.steps.taken += 1
        self._hints.begin(batch, samples)

    def batch_done(self) -> None:
        """The loop comes back from a batch."""
        if self.schedulers.steps:
            self.schedulers.batch_done()

    def count_unstepped(self) -> None:
        """Counts batches that were passed back through since the last step."""
        stepped, passed = self.guard.stepped, self.graphs.last_passed
        if stepped != self._steps_seen:
            self._steps_seen, self.unstepped = stepped, 0
        elif stepped and passed not in (None, self._passed):
            self.unstepped += 1
        self._passed = passed

    @property
    def _all_have_stepped(self) -> bool:
        return self._stepped.in_batch.issuperset(map(id, self.optimizers()))

    def barred(self) -> str:
        """Reason why a rank that joins would take other steps; "" if there is none.

        Its loop counts its batches from there on.
        """
        if self._is_uneven or not self._all_have_stepped:
            return "some batches are not followed by a step of every optimizer"
        return self.carried.seen()

    def drain_scalars(self, final: bool) -> Scalars:
        """Scalars logged since the last call; True waits for all."""
        return self._scalars.drain(final=final)

    def detach(self) -> None:
        """Removes every hook: no other epoch follows."""
        self.graphs.forget()
        if self._sum_loss is not None:
            self._sum_loss.detach()
        self.scaler.detach()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.schedulers.detach()
        self.copies.detach()


def _has_common_step(synchroniser: Synchroniser) -> bool:
    """Returns True if a window's gradients are summed for one step of all ranks."""
    windows = synchroniser.windows
    return windows is not None and windows.is_common_step
