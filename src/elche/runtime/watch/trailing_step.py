"""Refusal of an optimizer step after the loop, along left-over gradients.

The old habit of scripts that accumulate gradients: the remainder is stepped when the
loop is over. Under windows the last reduction has been by then, and what a rank has
left over is its own: the step would take its model away from the common one.
"""

from __future__ import annotations

import weakref
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from elche.errors import ConfigError


@final
class TrailingSteps:
    """Watches optimizers between epochs of windows; costs nothing inside of them.

    Args:
        model: what they step; also one that the run was not told of.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._left: list[weakref.ref[torch.Tensor]] = []
        self._policy = ""
        self._handle: RemovableHandle | None = None

    def watch(self, policy: str) -> None:
        """An epoch of windows is over: its gradients may not be stepped any more."""
        self.forget()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        if gradients:
            self._policy = policy
            self._left = [weakref.ref(gradient) for gradient in gradients]
            self._handle = register_optimizer_step_pre_hook(self._refuse)

    def forget(self) -> None:
        """An epoch begins, or the run is over."""
        self._left.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _refuse(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        left = {id(gradient) for ref in self._left if (gradient := ref()) is not None}
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if any(id(each) in left and bool(each.any()) for each in held):
            raise ConfigError(
                f"optimizer.step() after the loop, under policy {self._policy!r}: the "
                "gradients that the loop left over are this rank's own, and its model "
                "would not be the common one any more; step inside the loop, drop what "
                "is left over (optimizer.zero_grad() instead of this step), or choose "
                "policy 'sync', whose gradients all ranks have in common"
            )
