"""Learning rates that the user's loop moves inside an epoch of windows."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any, final

import torch

from elche.errors import ConfigError

logger = logging.getLogger(__name__)

_follow_progress: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def follows_progress(optimizer: torch.optim.Optimizer) -> None:
    """Marks an optimizer whose rates are set from the run's progress."""
    _follow_progress.add(optimizer)


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """True if a scheduler of torch's has been made for an optimizer."""
    groups = optimizer.param_groups
    return "step" in vars(optimizer) and any("initial_lr" in each for each in groups)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Sets the learning rate of a parameter group, in place where it is a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


@final
class RateWatch:
    """Refuses a scheduler that counts one rank's batches; warns of a rate set by hand.

    In windows each rank runs its own number of batches. A schedule that counts them
    ends elsewhere than on one device, and differs between ranks.

    Args:
        policy: policy of the run.

    Attributes:
        has_read_progress: the loop has read the run's progress, so rates set by hand
            are assumed to follow it.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._rates: dict[int, list[float]] = {}
        self._has_warned = False
        self.has_read_progress = False

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Records the rates with which an epoch, or a part of it, begins."""
        self._rates = {id(optimizer): _rates(optimizer) for optimizer in optimizers}

    def has_moved(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """True if a rate that does not follow the run's progress has moved since."""
        return any(
            self._rates.get(id(optimizer), now := _rates(optimizer)) != now
            for optimizer in optimizers
            if optimizer not in _follow_progress
        )

    def expect(self, optimizer: torch.optim.Optimizer) -> None:
        """Records rates that a registered scheduler has set."""
        self._rates[id(optimizer)] = _rates(optimizer)

    def check(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Compares rates inside an epoch.

        Raises:
            ConfigError: an unregistered scheduler has moved one.
        """
        for optimizer in optimizers:
            now = _rates(optimizer)
            before = self._rates.setdefault(id(optimizer), now)
            moved = [
                pair for pair in zip(before, now, strict=False) if len({*pair}) > 1
            ]
            if not moved or optimizer in _follow_progress:
                continue
            (old, new), *_ = moved
            text = (
                f"the learning rate of {type(optimizer).__name__} changed inside an "
                f"epoch ({old:.3g} to {new:.3g}) under policy {self._policy!r}, where "
                "each rank runs its own number of batches: the rate would end "
                "differently on each rank, and differ from one device; "
            )
            if is_scheduled(optimizer):
                raise ConfigError(
                    text + "pass its scheduler (elche.setup(..., schedulers="
                    "[scheduler]), or elche.follow(scheduler) after it), or choose "
                    "policy 'sync'"
                )
            if not (self._has_warned or self.has_read_progress):
                self._has_warned = True
                logger.warning(
                    "%scompute it from elche.progress_steps() (or let elche.ProgressLR "
                    "do so), or choose policy 'sync'",
                    text,
                )


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
