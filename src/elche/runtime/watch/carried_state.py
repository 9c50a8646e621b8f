"""State that moves with a rank's batches and that elche cannot carry to another rank.

An excluded rank, and one that joins, takes over model and optimizers. Whatever else its
loop would have moved stays behind. So where such state is seen, no rank is excluded and
none joins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.runtime.sync.resume_sync import plain_schedule
from elche.runtime.watch.followed_schedulers import FollowedSchedulers
from elche.runtime.watch.model_copies import ModelCopies
from elche.runtime.watch.rate_watch import RateWatch, is_scheduled
from elche.runtime.watch.scaler_watch import ScalerWatch

UNCOUNTED = "the loop may count steps (say epochs=, or use loader.steps(n))"


@final
class CarriedState:
    """Names state of this rank that cannot be carried.

    Args:
        model: what is trained.
        optimizers: returns those that step it.
        scaler: sees GradScalers.
        copies: sees averages of the model's weights.
        schedulers: those that were handed over.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Callable[[], list[torch.optim.Optimizer]],
        scaler: ScalerWatch,
        copies: ModelCopies,
        schedulers: FollowedSchedulers,
    ) -> None:
        self._schedulers = schedulers
        self._copies = copies
        self._model = model
        self._optimizers = optimizers
        self._scaler = scaler
        self._rates = RateWatch("sync")
        self._found = ""
        self._may_count = True

    def begin_epoch(self, *, is_counted: bool) -> None:
        """Rates that move from now on move with batches.

        Args:
            is_counted: epochs, or steps, are counted here and not by the loop.
        """
        self._rates.begin(self._optimizers())
        self._may_count = not is_counted
        if is_counted:
            self._copies.attach()

    def meets(self, call: str) -> None:
        """The loop has called something inside an epoch that all ranks must call."""
        self._found = f"the loop calls {call}, which every rank must come to"

    @property
    def carried_schedulers(self) -> list[LRScheduler]:
        """Schedulers that were handed over, with a state that can be carried."""
        held = self._schedulers.schedulers
        return [each for each in held if plain_schedule(each) is not None]

    def unknown(self) -> str:
        """State that was found first, in words; "" if there is none."""
        self._found = self.seen()
        return self._found or (UNCOUNTED if self._may_count else "")

    def seen(self) -> str:
        """The same, where the loop may count its steps."""
        if self._found:
            return self._found
        known = {id(each.optimizer) for each in self.carried_schedulers}
        optimizers = [o for o in self._optimizers() if id(o) not in known]
        if any(map(is_scheduled, optimizers)):
            return "elche does not know of the learning rate scheduler (schedulers=)"
        if self._rates.has_moved(optimizers):
            return "the learning rate moves inside an epoch"
        if self._scaler.has_scaler:
            return "the loop steps with a GradScaler"
        if self._copies.has_unknown:
            return "elche does not know of the AveragedModel (copies=[...])"
        if sync_batchnorm_layers(self._model):
            return "SyncBatchNorm layers need every rank"
        if dist.is_available() and dist.is_initialized():
            return "the script has a process group of torch's"
        return ""
