"""GradScalers of the loop: the steps that they skip, and their refusal.

A scaler skips a step where gradients overflow. Its batches count as done, so nothing
else shows that the model did not learn from them. A fused optimizer is always called,
and skips the step itself if ``found_inf`` is set.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, final

import torch

from elche.errors import ConfigError
from elche.runtime.report.scalars import ScalarLog

NAME = "grad_scaler_skips"
"""Name of the scalar whose mean is the fraction of skipped steps."""
NO_GRADIENTS = (
    "a GradScaler cannot step where gradients are summed over a window "
    "(update='gradients'), because each rank would scale them by its own factor; train "
    "without one (autocast to bfloat16 needs none), leave update out, or choose policy "
    "'sync'"
)
_watches = weakref.WeakKeyDictionary[
    torch.optim.Optimizer, "weakref.ref[ScalerWatch]"
]()
"""Watches, by the optimizer that the scaler steps."""


@final
class ScalerWatch:
    """Logs 1 for a step that a GradScaler skipped and 0 for one that was taken.

    Args:
        optimizer: optimizer that the scaler steps.
        scalars: log that receives the values.

    Attributes:
        has_scaler: a scaler has stepped, as far as is known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scalars: ScalarLog) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._scalars = scalars
        self._is_refused: Callable[[], bool] = bool
        self.has_scaler = False

    def attach(self, is_refused: Callable[[], bool] = bool) -> None:
        """Starts watching scalers' steps; refuses them while ``is_refused()``."""
        self._is_refused = is_refused
        if (optimizer := self._optimizer()) is not None:
            _watches[optimizer] = weakref.ref(self)
            _watch_scalers()

    def detach(self) -> None:
        """Stops watching scalers' steps."""
        if (optimizer := self._optimizer()) is not None:
            _watches.pop(optimizer, None)

    def step(self, optimizer: torch.optim.Optimizer, take: Callable[[], Any]) -> Any:
        """Has a scaler take its step, or skip it.

        Raises:
            ConfigError: scalers are refused now.
        """
        if self._is_refused():
            raise ConfigError(NO_GRADIENTS)
        skipped: float | torch.Tensor = 1.0
        self.has_scaler = True

        def stepped(*_: Any) -> None:
            nonlocal skipped
            found, skipped = getattr(optimizer, "found_inf", None), 0.0
            if isinstance(found, torch.Tensor):  # a fused optimizer skips by itself
                skipped = (found.detach() > 0).to(torch.float32)

        handle = optimizer.register_step_post_hook(stepped)
        try:
            result = take()
        finally:
            handle.remove()
        self._scalars.log(NAME, skipped, 1.0)
        return result


@functools.cache
def _watch_scalers() -> None:
    """Has every GradScaler of the process step through the optimizer's watch."""
    original = torch.amp.GradScaler.step

    @functools.wraps(original)
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        take = functools.partial(original, scaler, optimizer, *args, **kwargs)
        found = _watches.get(optimizer) if scaler.is_enabled() else None
        watch = None if found is None else found()
        return take() if watch is None else watch.step(optimizer, take)

    setattr(torch.amp.GradScaler, "step", step)  # noqa: B010
