"""GradScalers of the loop: the steps that they skip, and their refusal.

A scaler skips a step where gradients overflow. Its batches count as done, so nothing
else would show that nothing was learned from them. A scaler reads a flag of the
optimizer, and then calls `step()` or not. Others may read the flag, too. So a batch has
a skipped step if the flag was read, no step followed, and no finite gradient is left
that waits for one. A fused optimizer is always called, and skips by itself where
``found_inf`` says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from elche.comm.tensors.nan_check import all_finite
from elche.errors import ConfigError
from elche.runtime.report.scalars import ScalarLog
from elche.torch_internals.groups import SCALER_FLAG

NAME = "grad_scaler_skips"
"""Name of the scalar whose mean is the fraction of skipped steps."""
NO_GRADIENTS = (
    "a GradScaler cannot step where gradients are summed over a window "
    "(update='gradients'), because each rank would scale them by its own factor; train "
    "without one (autocast to bfloat16 needs none), leave update out, or choose policy "
    "'sync'"
)


@final
class ScalerWatch:
    """Logs 1 for a step that a GradScaler skipped and 0 for one that was taken.

    Waits for the device only where a step was skipped, as the scaler itself does. Of
    several steps in one batch, a skipped one shows if it is the last.

    Args:
        optimizer: what the scaler steps.
        scalars: where it is logged.

    Attributes:
        is_asked: the flag was read, and no step has followed.
        has_scaler: one has read the flag, as far as is known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scalars: ScalarLog) -> None:
        self._optimizer = optimizer
        self._scalars = scalars
        self._is_refused: Callable[[], bool] = bool
        self._flag: _Flag | None = None
        self._handle: RemovableHandle | None = None
        self.is_asked = self.has_scaler = False

    def refuse_where(self, is_refused: Callable[[], bool]) -> None:
        """Refuses scalers where this is true: no gradients are there to work on."""
        self._is_refused = is_refused

    def attach(self) -> None:
        """Begins to watch the optimizer."""
        if self._flag is not None:
            return
        held = vars(self._optimizer).get(SCALER_FLAG)
        flag = _Flag(self, getattr(self._optimizer, SCALER_FLAG, False), held)
        try:
            setattr(self._optimizer, SCALER_FLAG, flag)
        except AttributeError:  # an optimizer that computes the flag
            return
        self._flag = flag
        me = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (watch := me()) is not None and watch.is_asked:
                watch._stepped(optimizer, flag)

        self._handle = self._optimizer.register_step_post_hook(stepped)

    def detach(self) -> None:
        """Leaves the optimizer as it was, unless somebody else has changed it since."""
        flag, handle = self._flag, self._handle
        if flag is None or handle is None:
            return
        handle.remove()
        held, is_ours = flag.held, vars(self._optimizer).get(SCALER_FLAG) is flag
        if is_ours and held is None:
            delattr(self._optimizer, SCALER_FLAG)
        elif is_ours:
            setattr(self._optimizer, SCALER_FLAG, held)
        self._flag = self._handle = None

    def settle(self) -> None:
        """A loop body is over: counts a step that was asked for and has not come."""
        if self.is_asked:
            self.is_asked = False
            if not _has_pending(self._optimizer):
                self._scalars.log(NAME, 1.0, 1.0)

    def asked(self) -> None:
        """A scaler is about to step, or not; or somebody else has read the flag.

        Raises:
            ConfigError: scalers are refused now.
        """
        if self._is_refused():
            raise ConfigError(NO_GRADIENTS)
        self.is_asked = self.has_scaler = True

    def _stepped(self, optimizer: torch.optim.Optimizer, flag: _Flag) -> None:
        self.is_asked = False
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            self._scalars.log(NAME, (found.detach() > 0).to(torch.float32), 1.0)
        elif not flag.is_true:  # a scaler would have brought found_inf
            self._scalars.log(NAME, 0.0, 1.0)


@final
class _Flag:
    """Stands where a scaler looks, and is as true as what stood there before.

    Args:
        watch: told when a scaler looks.
        value: what the optimizer answered.
        held: what it held itself; None where its class answered.
    """

    def __init__(self, watch: ScalerWatch, value: Any, held: Any) -> None:
        self._watch = weakref.ref(watch)
        self.is_true = bool(value)
        self.held = held

    def __bool__(self) -> bool:
        if (watch := self._watch()) is not None:
            watch.asked()
        return self.is_true

    def __reduce__(self) -> tuple[Any, ...]:
        return (bool, (self.is_true,))


def _has_pending(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if finite gradients wait for a step, and are not only zeros."""
    held = [p.grad for group in optimizer.param_groups for p in group["params"]]
    gradients = [
        g.coalesce().values() if g.is_sparse else g for g in held if g is not None
    ]
    return all_finite(gradients) and any(bool(g.any()) for g in gradients)
