"""Detection of the optimizers that step a model, foreign ones included."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

Check = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]


@final
class OptimizersSeen:
    """Watches the optimizers of this process.

    Where one rank trains alone for a while and all go on from where it stands, the
    state of every optimizer belongs to that.

    Args:
        model: what is trained.
        optimizers: those given to `elche.setup`; they come first.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._model = model
        self._given = list(optimizers)
        self._others: list[weakref.ref[torch.optim.Optimizer]] = []
        self._passed_over: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepped: set[int] = set()
        self._handle: Any = None

    def attach(self, check: Check | None = None) -> None:
        """Begins to watch.

        Args:
            check: called before every step, as torch calls its own hooks.
        """
        me = weakref.WeakMethod(self._see)

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            see = me()
            if see is None:
                return None
            see(optimizer)
            return None if check is None else check(optimizer, args, kwargs)

        self._handle = register_optimizer_step_pre_hook(hook)

    def detach(self) -> None:
        """Ends it."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def all(self) -> list[torch.optim.Optimizer]:
        """Those that are still there, in the order in which they stepped first."""
        others = (ref() for ref in self._others)
        return [*self._given, *(other for other in others if other is not None)]

    def begin_batch(self) -> None:
        """Forgets which of them have stepped."""
        self._stepped.clear()

    @property
    def have_stepped(self) -> bool:
        """Whether each of them has since."""
        return self._stepped.issuperset(map(id, self.all()))

    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(id(optimizer))
        known = (*self._given, *(ref() for ref in self._others))
        if optimizer in self._passed_over or any(o is optimizer for o in known):
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(parameter) in held for parameter in self._model.parameters()):
            self._others.append(weakref.ref(optimizer))
        else:
            self._passed_over.add(optimizer)
