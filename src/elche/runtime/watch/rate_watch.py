"""Learning rates changed by the user's loop inside an epoch of windows."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Iterable
from typing import final

import torch

logger = logging.getLogger(__name__)

_follow_progress: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def follows_progress(optimizer: torch.optim.Optimizer) -> None:
    """Marks an optimizer whose rates are set from the run's progress."""
    _follow_progress.add(optimizer)


@final
class RateWatch:
    """Warns once of a schedule that counts one rank's batches.

    In windows each rank runs other numbers of batches, so a schedule that moves with
    them ends elsewhere than on one device, and on each rank elsewhere.
    """

    def __init__(self) -> None:
        self._rates: dict[int, list[float]] = {}
        self._has_warned = False

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """An epoch of windows begins with these rates."""
        self._rates = {id(optimizer): _rates(optimizer) for optimizer in optimizers}

    def check(self, optimizers: Iterable[torch.optim.Optimizer], policy: str) -> None:
        """A window has ended; the epoch has not."""
        if self._has_warned:
            return
        for optimizer in optimizers:
            before = self._rates.get(id(optimizer))
            if before is None or optimizer in _follow_progress:
                continue
            now = _rates(optimizer)
            if any(map(operator.ne, before, now)):
                self._warn(optimizer, before, now, policy)
                return

    def _warn(
        self,
        optimizer: torch.optim.Optimizer,
        before: list[float],
        now: list[float],
        policy: str,
    ) -> None:
        self._has_warned = True
        old, new = next(
            pair for pair in zip(before, now, strict=False) if pair[0] != pair[1]
        )
        logger.warning(
            "the learning rate of %s moved inside an epoch (%.3g to %.3g) under policy "
            "%r, where each rank runs its own number of batches: a schedule that is "
            "stepped per batch ends elsewhere than on one device, and on each rank "
            "elsewhere. Let it follow the run's progress with elche.ProgressLR("
            "optimizer, fn, total_samples), or choose policy 'sync'",
            type(optimizer).__name__,
            old,
            new,
            policy,
        )


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
