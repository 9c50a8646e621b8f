"""State that moves with a rank's batches and that elche cannot carry to another rank.

A rank that is left out of steps under ``sync`` takes over model and optimizers, and so
does one that joins. What else its loop would have moved stays behind, so where such
state is seen no rank is, and none does.
"""

from __future__ import annotations

from typing import final

from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.runtime.resume_sync import plain_schedule
from elche.runtime.watch.followed_schedulers import FollowedSchedulers
from elche.runtime.watch.optimizers_seen import OptimizersSeen
from elche.runtime.watch.rate_watch import RateWatch, is_scheduled
from elche.runtime.watch.scaler_skips import ScalerSkips
from elche.runtime.windows.model_copies import ModelCopies

UNCOUNTED = "the loop may count steps (say epochs=, or use loader.steps(n))"


@final
class BatchStateWatch:
    """Names such state of this rank.

    Args:
        model: what is trained.
        optimizers: that step it.
        skips: sees GradScalers.
        copies: sees averages of the model's weights.
        schedulers: those that were handed over.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: OptimizersSeen,
        skips: ScalerSkips,
        copies: ModelCopies,
        schedulers: FollowedSchedulers,
    ) -> None:
        self._schedulers = schedulers
        self._copies = copies
        self._model = model
        self._optimizers = optimizers
        self._skips = skips
        self._rates = RateWatch("sync")
        self._found = ""
        self._may_count, self._is_uneven = True, False

    def begin_epoch(self, *, is_counted: bool) -> None:
        """Rates that move from now on move with batches.

        Args:
            is_counted: epochs, or steps, are counted here and not by the loop.
        """
        self._rates.begin(self._optimizers.all())
        self._may_count = not is_counted
        if is_counted:
            self._copies.attach()

    def meets(self, call: str) -> None:
        """The loop has called something inside an epoch that all ranks must call."""
        self._found = f"the loop calls {call}, which every rank must come to"

    @property
    def has_scaler(self) -> bool:
        """Whether a GradScaler has stepped."""
        return self._skips.has_scaler

    @property
    def carried_schedulers(self) -> list[LRScheduler]:
        """Those that were handed over, with a state that can be carried."""
        held = self._schedulers.schedulers
        return [each for each in held if plain_schedule(each) is not None]

    def unknown(self) -> str:
        """What was found first, in words; "" if nothing was."""
        self._found = self._found or self._look()
        return self._found or (UNCOUNTED if self._may_count else "")

    def batch_done(self) -> None:
        """The loop comes back from a batch that had a backward pass."""
        self._is_uneven |= not self._optimizers.have_stepped
        self._optimizers.begin_batch()

    def barred(self) -> str:
        """Why a rank that joins would not take the same steps; "" if it would.

        Its loop counts its batches from there on.
        """
        if self._is_uneven or not self._optimizers.have_stepped:
            return "some batches are not followed by a step of every optimizer"
        return self._found or self._look()

    def _look(self) -> str:
        known = {id(each.optimizer) for each in self.carried_schedulers}
        optimizers = [o for o in self._optimizers.all() if id(o) not in known]
        if any(map(is_scheduled, optimizers)):
            return "elche does not know of the learning rate scheduler (schedulers=)"
        if self._rates.has_moved(optimizers):
            return "the learning rate moves inside an epoch"
        if self.has_scaler:
            return "the loop steps with a GradScaler"
        if self._copies.has_unknown:
            return "elche does not know of the AveragedModel (copies=[...])"
        if sync_batchnorm_layers(self._model):
            return "SyncBatchNorm layers need every rank"
        if dist.is_available() and dist.is_initialized():
            return "the script has a process group of torch's"
        return ""
