"""Guard against calls that a common step at a window's end would make ineffective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from elche.errors import ConfigError
from elche.torch_internals.groups import SCALER_FLAG


@final
class LoopGuard:
    """Refuses a GradScaler and a second optimizer while gradients are summed.

    Between two common steps there are no gradients for either to work on: the scaler
    fails without a reason, and the second optimizer never moves anything.

    Args:
        optimizer: takes the common step.
        parameters: the trained parameters of the model.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._flag_before: Any = None

    def attach(self) -> None:
        """Refuses scalers from now on."""
        self._flag_before = vars(self._optimizer).get(SCALER_FLAG)
        setattr(self._optimizer, SCALER_FLAG, _NoScaler())

    def detach(self) -> None:
        """Leaves everything as it was."""
        if not isinstance(vars(self._optimizer).get(SCALER_FLAG), _NoScaler):
            return
        if self._flag_before is None:
            delattr(self._optimizer, SCALER_FLAG)
        else:
            setattr(self._optimizer, SCALER_FLAG, self._flag_before)

    def refuse_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step; the hook that calls this is the step guard's."""
        if optimizer is self._optimizer:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        groups = self._optimizer.param_groups
        common = {id(p) for group in groups for p in group["params"]}
        alone = [p for p in self._parameters if id(p) in held - common]
        if alone:
            raise ConfigError(
                f"a second optimizer ({type(optimizer).__name__}) steps {len(alone)} "
                "of the model's parameters, and a window's common step is that of the "
                "optimizer given to elche.setup alone; leave update='gradients' out, "
                "or choose policy 'sync'"
            )


class _NoScaler:
    """Stands where a GradScaler looks for a flag."""

    def __bool__(self) -> bool:
        raise ConfigError(
            "a GradScaler cannot step where gradients are summed over a window "
            "(update='gradients'), because each rank would scale them by its own "
            "factor; train without one (autocast to bfloat16 needs none), leave update "
            "out, or choose policy 'sync'"
        )
