"""Learning rates that follow the run's progress, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from elche.errors import ConfigError
from elche.runtime.run import Run
from elche.runtime.watch.followed_schedulers import check_scheduler
from elche.runtime.watch.rate_watch import follows_progress
from elche.session.process import needed, process
from elche.session.state import progress_samples

Scheduler = TypeVar("Scheduler", bound=LRScheduler)


def follow(scheduler: Scheduler) -> Scheduler:
    """Lets a scheduler of torch's follow the run's progress, equally on every rank.

    The loop's own ``scheduler.step()`` stays where it is. In windows (``cadence``,
    ``async``, ``auto``) it only tells after how many batches the schedule moves; elche
    steps it as often as one device would have by the samples that all ranks have
    trained on, and brings it to where one device ends when the epoch does, so that its
    ``state_dict()`` is that of one device. Between epochs the call is torch's own, with
    the mean over ranks of what ReduceLROnPlateau is told. Under ``sync`` and on one
    device nothing changes. ::

        model, optimizer, loader = elche.setup(model, optimizer, loader)
        scheduler = elche.follow(CosineAnnealingLR(optimizer, epochs * len(loader)))

    Args:
        scheduler: of torch.optim.lr_scheduler, its optimizer that of `setup` or
            another; or give it to `setup` as one of ``schedulers=``. The same ones on
            every rank.

    Returns:
        The scheduler.

    Raises:
        ConfigError: it is no scheduler of torch's, there is no run yet, or this is the
            inside of a loop. Calls inside a loop of windows raise it too where they
            have an argument, or come twice in a batch.
    """
    check_scheduler(scheduler)
    run = needed(process.run, "follow")
    if isinstance(run, Run):
        run.follow(scheduler)
    process.checkpoints.follow(scheduler)
    return scheduler


class ProgressLR:
    """Sets the learning rate as a function of global progress in samples.

    A rank's own steps say nothing about a run on unequal devices: a fast rank takes
    more of them. Progress is `elche.progress_samples` over ``total_samples``, the same
    function on every rank whatever its speed. Call :meth:`step` in the loop, before
    ``optimizer.step()``::

        schedule = elche.ProgressLR(optimizer, cosine, epochs * len(dataset))
        for batch in loader:
            schedule.step()
            ...

    Args:
        optimizer: whose groups' rates are set, as multiples of what they were first
            (``"initial_lr"``, as torch's schedulers name it).
        fn: factor on the rate by progress from 0 to 1.
        total_samples: samples of the whole run.
        scale: a constant factor on top.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fn: Callable[[float], float],
        total_samples: int,
        scale: float = 1.0,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"expected a torch.optim.Optimizer, got {optimizer!r}")
        if not callable(fn):
            raise ConfigError(f"expected fn to be callable, got {fn!r}")
        if not total_samples > 0:
            raise ConfigError(
                f"expected total_samples to be positive, got {total_samples!r}"
            )
        if not 0.0 < scale < math.inf:
            raise ConfigError(f"expected a positive finite scale, got {scale!r}")
        self._optimizer = optimizer
        self._fn = fn
        self._total_samples = total_samples
        self._scale = scale
        for group in optimizer.param_groups:
            _keep_initial(group)
        follows_progress(optimizer)

    def step(self) -> float:
        """Sets the rates for the batch in hand.

        Returns:
            The factor on the initial rates.

        Raises:
            ConfigError: ``fn`` gave no finite number, or a negative one.
        """
        progress = min(1.0, progress_samples() / self._total_samples)
        factor = self._fn(progress) * self._scale
        if not 0.0 <= factor < math.inf:
            raise ConfigError(
                f"expected the learning rate's factor at progress {progress:.3f} to be "
                f"finite and not negative, got {factor!r}"
            )
        for group in self._optimizer.param_groups:
            _keep_initial(group)
            rate = group["initial_lr"] * factor
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return factor


def _keep_initial(group: dict[str, Any]) -> None:
    """Notes a group's rate under the name that torch's schedulers use."""
    if "initial_lr" not in group:
        group["initial_lr"] = float(group["lr"])
