"""Tells which of a GradScaler's optimizer steps were skipped.

A scaler leaves a step out where gradients overflow. Its batches count as done, so
nothing else would show that nothing was learned from them. A scaler does not say so
either: it asks the optimizer a flag, and then calls `step()` or not. A fused optimizer
is always called, and skips by itself where ``found_inf`` says so.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from elche.runtime.scalars import ScalarLog

NAME = "grad_scaler_skips"
"""Of the scalar whose mean is the part of the steps that were skipped."""
AMP_FLAG = "_step_supports_amp_scaling"
"""What a GradScaler asks an optimizer before it steps."""
SCALER_MODULE = "torch.amp.grad_scaler"


@final
class ScalerSkips:
    """Logs 1 for a step that a GradScaler skipped and 0 for one that was taken.

    Nothing is logged without a scaler, and nothing waits for the device.

    Args:
        optimizer: what the scaler steps.
        scalars: where it is logged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scalars: ScalarLog) -> None:
        self._optimizer = optimizer
        self._scalars = scalars
        self._is_asked = False
        self._flag: _Flag | None = None
        self._handle: RemovableHandle | None = None

    def attach(self) -> None:
        """Begins to watch the optimizer."""
        if self._flag is not None:
            return
        held = vars(self._optimizer).get(AMP_FLAG)
        flag = _Flag(self, getattr(self._optimizer, AMP_FLAG, False), held)
        try:
            setattr(self._optimizer, AMP_FLAG, flag)
        except AttributeError:  # an optimizer that computes the flag
            return
        self._flag = flag
        me = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (watcher := me()) is not None:
                watcher._stepped(optimizer)

        self._handle = self._optimizer.register_step_post_hook(stepped)

    def detach(self) -> None:
        """Leaves the optimizer as it was, unless somebody else has changed it since."""
        flag, handle = self._flag, self._handle
        if flag is None or handle is None:
            return
        handle.remove()
        held, is_ours = flag.held, vars(self._optimizer).get(AMP_FLAG) is flag
        if is_ours and held is None:
            delattr(self._optimizer, AMP_FLAG)
        elif is_ours:
            setattr(self._optimizer, AMP_FLAG, held)
        self._flag = self._handle = None

    def settle(self) -> None:
        """The loop body is over: a step that was asked for has not come."""
        if self._is_asked:
            self._is_asked = False
            self._scalars.log(NAME, 1.0, 1.0)

    def asked(self) -> None:
        """A scaler is about to step, or not."""
        self.settle()
        self._is_asked = True

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_asked:
            return
        self._is_asked = False
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            self._scalars.log(NAME, (found.detach() > 0).to(torch.float32), 1.0)
        else:
            self._scalars.log(NAME, 0.0, 1.0)


@final
class _Flag:
    """Stands where a scaler looks, and is as true as what stood there before.

    Args:
        watcher: told when a scaler looks.
        value: what the optimizer answered.
        held: what it held itself; None where its class answered.
    """

    def __init__(self, watcher: ScalerSkips, value: Any, held: Any) -> None:
        self._watcher = weakref.ref(watcher)
        self._is_true = bool(value)
        self.held = held

    def __bool__(self) -> bool:
        watcher = self._watcher()
        caller = sys._getframe(1)
        is_step = caller.f_code.co_name == "step"
        if watcher is not None and is_step and _is_scaler(caller.f_globals):
            watcher.asked()
        return self._is_true

    def __reduce__(self) -> tuple[Any, ...]:
        return (bool, (self._is_true,))


def _is_scaler(module: dict[str, Any]) -> bool:
    return module.get("__name__") == SCALER_MODULE
