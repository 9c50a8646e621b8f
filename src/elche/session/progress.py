"""Progress of a run, its state, and learning rates that follow it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from elche.config_checks import check_not_negative, check_positive, check_whole
from elche.errors import ConfigError
from elche.runtime.run import Run
from elche.runtime.single import SingleRun
from elche.runtime.watch.followed_schedulers import check_scheduler
from elche.runtime.watch.rate_watch import follows_progress, set_rate
from elche.session.process import needed, process

STATE_VERSION = 2
STATE_KEYS = {"version", "samples", "steps", "averaging"}


def progress_samples() -> float:
    """Samples that the run has trained on, plus this window's planned ones so far.

    It is the same function of the run's progress on every rank, whatever its speed. A
    learning rate should follow it. The current batch does not count yet.
    """
    return 0.0 if process.run is None else float(process.run.progress_samples)


def progress_steps() -> float:
    """Steps that the run has taken: global batches of the loader, whatever the policy.

    It is the same function of the run's progress on every rank. A hand-written
    ``get_lr(step)`` should follow it. Under ``sync`` and on one device it is the number
    of finished loop bodies; in windows it grows by parts of a step.
    """
    return 0.0 if process.run is None else float(process.run.progress_steps)


def state_dict() -> dict[str, Any]:
    """State to resume from, beside the model and the optimizer; each rank's own.

    It holds the run's progress, a codec's residual, and the outer momentum where
    parameters are averaged. Call it between epochs, on every rank. Save it beside the
    states of the model and of the rank's optimizer (equal on all ranks only under
    ``sync``). Restore all three after `setup`: the run then continues as if it had not
    been interrupted. The script saves the states of the loader's generator and of
    Python's and torch's random numbers. `torch.load(weights_only=True)` loads the
    state. With ``seed=`` augmentation repeats the draws of the first epoch (give
    `setup` another seed). Speeds, the anchor and, under ``auto``, policy and averaging
    are measured or chosen again.

    Raises:
        ConfigError: there is no run yet, or an epoch has not ended.
        ProtocolError: the parameters have changed since the epoch ended.
    """
    return {"version": STATE_VERSION, **_run_between_epochs("state_dict").state_dict()}


def load_state_dict(state: dict[str, Any]) -> None:
    """Resumes from :func:`state_dict`, every rank from its own.

    Call it between epochs, on every rank, with the model in the state saved with it.
    New ranks load another rank's state with residuals of None. A state of another world
    size or codec is converted. A run of one rank averages nothing: it loads the
    progress alone.

    Raises:
        ConfigError: there is no run yet, it is called inside a loop, or the state is
            of averaged parameters and this run reduces gradients.
        MismatchError: a rank's state does not fit its model, or ranks' states do not
            belong together; nothing has changed on any of them.
        CommunicationError: a rank is lost, or did not call it in time.
    """
    run = _run_between_epochs("load_state_dict")
    if not isinstance(state, dict) or set(state) != STATE_KEYS:
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ConfigError(
            f"expected a state with entries {sorted(STATE_KEYS)}, got {found}"
        )
    if state["version"] != STATE_VERSION:
        raise ConfigError(
            f"expected a state of version {STATE_VERSION}, got {state['version']!r}"
        )
    check_whole("samples in the state", state["samples"], 0)
    check_not_negative("steps in the state", state["steps"])
    run.load_state_dict(state)


def _run_between_epochs(call: str) -> Run | SingleRun:
    run = process.run
    if run is None:
        raise ConfigError(f"elche.{call}() needs a run: call elche.setup first")
    if run.is_in_epoch:
        raise ConfigError(
            f"{call}() inside an epoch, where ranks hold different states; call it "
            "between epochs, on every rank"
        )
    return run


Scheduler = TypeVar("Scheduler", bound=LRScheduler)


def follow(scheduler: Scheduler) -> Scheduler:
    """Lets a scheduler of torch's follow the run's progress, equally on every rank.

    The loop's own ``scheduler.step()`` stays where it is. In windows (``cadence``,
    ``async``, ``auto``) it only shows elche after how many batches the schedule moves.
    elche steps it as often as one device would have, by the samples of all ranks. At
    the epoch's end its ``state_dict()`` is the same as on one device. Between epochs
    the call is torch's own, with the mean over ranks of ReduceLROnPlateau's metric.
    Under ``sync`` and on one device nothing changes. ::

        model, optimizer, loader = elche.setup(model, optimizer, loader)
        scheduler = elche.follow(CosineAnnealingLR(optimizer, epochs * len(loader)))

    Args:
        scheduler: scheduler of torch.optim.lr_scheduler, for `setup`'s optimizer or
            another; or give it to `setup` in ``schedulers=``. The same ones on every
            rank.

    Returns:
        The scheduler.

    Raises:
        ConfigError: it is no scheduler of torch's, there is no run yet, or it is called
            inside a loop. Calls inside a loop of windows raise it too where they have
            an argument, or come twice in a batch.
    """
    check_scheduler(scheduler)
    run = needed(process.run, "follow")
    if isinstance(run, Run):
        run.follow(scheduler)
    process.checkpoints.follow(scheduler)
    return scheduler


class ProgressLR:
    """Sets the learning rate as a function of global progress in samples.

    A rank's own steps do not measure a run on unequal devices: a fast rank takes more.
    Progress is `elche.progress_samples` over ``total_samples``, the same
    function on every rank whatever its speed. Call :meth:`step` in the loop, before
    ``optimizer.step()``::

        schedule = elche.ProgressLR(optimizer, cosine, epochs * len(dataset))
        for batch in loader:
            schedule.step()
            ...

    Args:
        optimizer: optimizer whose rates are set, as multiples of their first values
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
        check_positive("total_samples", total_samples)
        check_positive("scale", scale)
        self._optimizer = optimizer
        self._fn = fn
        self._total_samples = total_samples
        self._scale = scale
        for group in optimizer.param_groups:
            _keep_initial(group)
        follows_progress(optimizer)

    def step(self) -> float:
        """Sets the rates for the current batch.

        Returns:
            The factor on the initial rates.

        Raises:
            ConfigError: ``fn`` returned no finite number, or a negative one.
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
            set_rate(group, group["initial_lr"] * factor)
        return factor


def _keep_initial(group: dict[str, Any]) -> None:
    """Stores a group's first rate under the name that torch's schedulers use."""
    if "initial_lr" not in group:
        group["initial_lr"] = float(group["lr"])
