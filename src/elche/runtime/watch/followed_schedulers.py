"""Registered learning rate schedulers, which follow the run's progress in windows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from enum import Enum, auto
from itertools import chain, repeat, zip_longest
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from elche.coordination.accounts.schedule_steps import ScheduleSteps
from elche.coordination.accounts.step_count import StepCount
from elche.coordination.protocol.messages import Runs
from elche.errors import ConfigError
from elche.runtime.process.worker import Worker
from elche.runtime.watch.rate_watch import RateWatch


class LoopPlace(Enum):
    """Place of the user's loop, which decides the effect of ``scheduler.step()``.

    =======  ===================  ===========================================
    place    entered by           a call
    =======  ===================  ===========================================
    OUTSIDE  ``end_epoch()``      steps; a metric is the mean over ranks
    STEPS    ``begin_epoch()``    steps, and is counted
    WINDOWS  ``begin_windows()``  is counted: ``advance()`` steps what is due
    =======  ===================  ===========================================
    """

    OUTSIDE = auto()
    STEPS = auto()
    WINDOWS = auto()


@final
class FollowedSchedulers:
    """Steps schedulers by the run's progress, equally on every rank.

    Only a scheduler's own ``step()`` is called, so its state is that of a single
    process at every epoch's end. Under ``sync`` nothing is touched.

    Args:
        policy: policy of the run.
        mean: returns the mean of a number over all ranks; a collective.
        count: step count of the run.

    Attributes:
        schedulers: registered schedulers, in that order.
        steps: steps of each inside an epoch; [] between epochs.
        rates: watch over rates of unregistered schedulers.
    """

    def __init__(
        self, policy: str, mean: Callable[[float], float], count: StepCount
    ) -> None:
        self._policy = policy
        self._mean = mean
        self._count = count
        self._before = count.before
        self._place = LoopPlace.OUTSIDE
        self._samples_before = 0
        self.steps: list[ScheduleSteps] = []
        self._ahead: list[int] = []
        self._resumed: list[dict[str, Any]] = []
        self._kinds: list[type[LRScheduler]] = []
        self.schedulers: list[LRScheduler] = []
        self.rates = RateWatch(policy)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the registered schedulers."""
        return [scheduler.optimizer for scheduler in self.schedulers]

    def add(self, scheduler: LRScheduler) -> None:
        """Registers a scheduler, which follows the run from now on.

        Raises:
            ConfigError: the loop is inside an epoch.
        """
        if self._place is not LoopPlace.OUTSIDE:
            raise ConfigError(
                "elche.follow(scheduler) inside the loop; call it before the loop, on "
                "every rank"
            )
        if any(scheduler is each for each in self.schedulers):
            return
        self.schedulers.append(scheduler)
        kind = type(scheduler)
        self._kinds.append(kind)
        if self._policy != "sync":
            self._intercept(scheduler, kind, len(self.schedulers) - 1)

    def _intercept(self, scheduler: LRScheduler, kind: type, at: int) -> None:
        """Intercepts the user's calls, by a subclass of the scheduler's own class.

        ``state_dict()``, which lists attributes, stays as it was; copies are torch's.
        """

        def step(_: LRScheduler, *args: Any, **named: Any) -> None:
            self._called(at, args, named)

        def reduce(each: LRScheduler) -> tuple[Any, ...]:
            return kind.__new__, (kind,), vars(each)

        names = {"step": step, "__reduce__": reduce, "__module__": kind.__module__}
        scheduler.__class__ = type(kind.__name__, (kind,), names)

    def detach(self) -> None:
        """Restores every scheduler's own ``step()``."""
        for scheduler, kind in zip(self.schedulers, self._kinds, strict=True):
            scheduler.__class__ = kind
        self.schedulers.clear()
        self._kinds.clear()

    def begin_epoch(
        self,
        samples_before: int,
        optimizers: Iterable[torch.optim.Optimizer],
        done_samples: int = 0,
    ) -> None:
        """Begins an epoch, and the count of the loop's calls in it.

        Args:
            samples_before: samples of the run before the epoch.
            optimizers: optimizers that step the model.
            done_samples: samples of the epoch that were trained before a resume.
        """
        self._samples_before, self._before = samples_before, self._count.before
        of_epoch = self._count.of_epoch
        ahead = chain(self._ahead, repeat(0))
        self.steps = [
            ScheduleSteps(of_epoch, _steps_left(scheduler), before)
            for scheduler, before in zip(self.schedulers, ahead)  # noqa: B905 - endless
        ]
        for steps, state in zip_longest(self.steps, self._resumed[: len(self.steps)]):
            if state and state["calls"]:
                steps.load_state_dict(state)
            elif done_samples:
                steps.skip(self._count.at(done_samples) - self._before)
        self._resumed = []
        self._place = LoopPlace.STEPS
        self.rates.begin(optimizers)

    def begin_part(self) -> None:
        """Keeps the counts across the parts of a cut epoch."""
        self._place = LoopPlace.STEPS

    def state_dict(self) -> list[dict[str, Any]]:
        """Counts of an epoch that is cut; [] between epochs."""
        return [steps.state_dict() for steps in self.steps]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restores :meth:`state_dict` in the epoch that begins next."""
        self._resumed = state

    def begin_windows(self) -> None:
        """Begins windows for the rest of the epoch."""
        self._place = LoopPlace.WINDOWS

    def advance(self, samples: float, *, is_agreed: bool = False) -> None:
        """Takes the steps that are due in windows at ``samples`` of the run.

        Args:
            samples: samples of the run, planned ones included.
            is_agreed: take only steps that every rank takes here, for a common step.
        """
        batches = self._count.at(samples - self._samples_before) - self._before
        self._take([each.due(batches, is_agreed=is_agreed) for each in self.steps])

    def batch_done(self) -> None:
        """Counts a batch that the loop has run."""
        for steps in self.steps:
            steps.batch_done()

    def periods(self) -> Runs:
        """Periods of each schedule in this rank's loop, for a window's end."""
        return tuple(steps.report for steps in self.steps)

    def agree(self, periods: tuple[int, ...]) -> None:
        """Adopts the periods that all ranks agree on."""
        for steps, period in zip(self.steps, periods, strict=True):
            steps.agree(period)

    def end_epoch(self, *, has_ended: bool) -> None:
        """Ends the epoch; ``has_ended`` is False if it was broken off."""
        self._ahead = []
        if self._place is LoopPlace.WINDOWS and has_ended:
            batches = self._count.before - self._before
            self._take([steps.due_at_end(batches) for steps in self.steps])
            self._ahead = [steps.ahead(batches) for steps in self.steps]
        self._place = LoopPlace.OUTSIDE
        self.steps = []

    def _take(self, due: list[int]) -> None:
        if not any(due):
            return
        with warnings.catch_warnings():  # on a rank that has taken no step itself
            advice = "Detected call of `lr_scheduler.step"
            warnings.filterwarnings("ignore", advice, UserWarning)
            for at, count in enumerate(due):
                for _ in range(count):
                    self._step(at)

    def _step(self, at: int, *args: Any, **named: Any) -> None:
        """Calls the scheduler's own step."""
        scheduler = self.schedulers[at]
        optimizer = scheduler.optimizer
        if self.steps:
            self.rates.check([optimizer])
            self.steps[at].taken += 1
        self._kinds[at].step(scheduler, *args, **named)
        self.rates.expect(optimizer)

    def _called(self, at: int, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Handles the user's call of ``step()``."""
        scheduler, name = self.schedulers[at], self._kinds[at].__name__
        if self._place is LoopPlace.OUTSIDE:
            is_plateau = isinstance(scheduler, ReduceLROnPlateau)
            (self._step_plateau if is_plateau else self._step)(at, *args, **named)
            return
        if args or named:
            raise ConfigError(
                f"{name}.step() with an argument inside the loop, under policy "
                f"{self._policy!r}: it is this rank's progress or metric, not the "
                "run's; call step() without one (ReduceLROnPlateau: between epochs), "
                "or choose policy 'sync'"
            )
        if not self.steps[at].called():
            raise ConfigError(
                f"{name}.step() twice in one batch, under policy {self._policy!r}: "
                "expected once in as many batches each time; choose policy 'sync'"
            )
        if self._place is LoopPlace.STEPS and self.steps[at].is_called_for:
            self._step(at)

    def _step_plateau(self, at: int, metrics: Any, *args: Any, **named: Any) -> None:
        """Calls the scheduler's own step with a metric's mean over all ranks."""
        self._step(at, self._mean(float(metrics)), *args, **named)


def check_scheduler(scheduler: object) -> None:
    """Refuses anything but a scheduler of torch's.

    Raises:
        ConfigError: it is another object; the message names it.
    """
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            "expected a scheduler of torch.optim.lr_scheduler, got "
            f"{type(scheduler).__name__}; compute a rate of another kind from "
            "elche.progress_steps()"
        )


def mean_of(worker: Worker, metric: float) -> float:
    """The mean of a metric over all ranks; called by all of them."""
    worker.regroup_if_due()
    total = torch.tensor(metric, dtype=torch.float64, device="cpu")
    worker.group.all_reduce(total, "agreeing on the metric of a scheduler")
    return total.item() / worker.group.world_size


def _steps_left(scheduler: LRScheduler) -> int | None:
    """Steps until a scheduler raises; None if it never does."""
    if not isinstance(scheduler, OneCycleLR):
        return None
    return scheduler.total_steps - scheduler.last_epoch
