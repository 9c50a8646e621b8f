"""Refusal of optimizer steps along gradients that ranks do not have in common.

Every step is asked, inside of epochs and outside: were its gradients reduced? Those
that were changed or replaced after their reduction pass: what all ranks do alike is
exact. Parameters that are not the model's nobody reduces: what a loop makes anew for
each batch is its own; what is stepped in two batches, or was in an optimizer before the
loop, is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any, final

import torch

from elche.coordination.accounts.step_count import StepCount
from elche.errors import ConfigError
from elche.runtime.rank_settings import foreign_parameters
from elche.runtime.watch.made_before import parameters_in_optimizers
from elche.runtime.windows.synchroniser import Synchroniser
from elche.torch_internals.passes import graph_task_id


@final
class StepGuard:
    """Checks every optimizer step of this process before it is taken.

    Args:
        steps: counts the batches that the loop has taken.

    Attributes:
        synchroniser: knows which gradients are reduced; given before the first step.
        is_inside: the loop is inside an epoch.
        stepped: steps of optimizers so far.
    """

    synchroniser: Synchroniser

    def __init__(self, steps: StepCount) -> None:
        self._steps = steps
        self._stepped = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._foreign: dict[int, tuple[weakref.ref[torch.Tensor], int]] | None = None
        self.is_inside = False
        self.stepped = 0

    def begin_part(self) -> None:
        """The loop begins, in which optimizers step."""
        self.is_inside = True
        if self._foreign is None:
            self._foreign = {
                id(p): (weakref.ref(p), -1) for p in parameters_in_optimizers()
            }

    def check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """A hook before the step; where that has a closure, after each call of it.

        Raises:
            ConfigError: the step would not be that of the other ranks.
        """
        self.stepped += 1
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._check(optimizer)
            return None

        def checked() -> Any:
            loss = closure()
            self._check(optimizer)
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], checked, *args[2:]), others

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        sync, is_inside = self.synchroniser, self.is_inside
        reduced, windows, own = sync.reduced, sync.windows, sync.own_ids
        if windows is not None:
            windows.refuse_step(optimizer)
        is_new = self._stepped.get(optimizer) != reduced.passes
        self._stepped[optimizer] = reduced.passes
        is_local = is_inside and windows is not None and windows.takes_steps
        is_closed = sync.reducer is not None and graph_task_id() == -1
        usual: Container[int] = own if is_local else ()
        if is_closed and is_new and not reduced.strays:
            usual = reduced.given
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(map(usual.__contains__, map(id, parameters))):
            return
        held = [p for p in parameters if p.grad is not None]
        for parameter in (p for p in held if id(p) in own and not is_local):
            given = reduced.given.get(id(parameter))
            is_given = given is not None and (is_new or given() is parameter.grad)
            is_stray = id(parameter) in reduced.strays
            is_common = is_closed and is_given and not is_stray
            if not is_common and _moves(parameter.grad):
                sync.check()  # names what was unfrozen inside an epoch
                raise ConfigError(_why(sync, parameter, is_inside, is_stray))
        foreign = [p for p in held if id(p) not in own]
        if foreign and is_inside:
            self._look_at(foreign, optimizer)

    def _look_at(
        self, foreign: list[torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Refuses parameters older than the batch in hand."""
        now, known = self._steps.taken, self._foreign or {}
        seen = {at: s for at, s in known.items() if s[0]() is not None}
        old = [p for p in foreign if id(p) in seen and seen[id(p)][1] < now]
        if any(_moves(p.grad) for p in old):
            why = foreign_parameters(type(optimizer).__name__, old)
            raise ConfigError(
                f"{why}; what begins anew in every batch is made inside the loop"
            )
        self._foreign = {id(p): (weakref.ref(p), now) for p in foreign} | seen


def _moves(gradient: Any) -> bool:
    """Returns True if a value is not zero; waits for the device."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any())


def _why(
    sync: Synchroniser, parameter: torch.Tensor, is_inside: bool, is_stray: bool
) -> str:
    of = f"a parameter of shape {list(parameter.shape)}"
    if graph_task_id() != -1:
        return (
            f"optimizer.step() inside a backward pass: the gradient of {of} has not "
            "been reduced; step after loss.backward()"
        )
    if is_stray or (sync.reducer is None and not is_inside):
        return (
            f"optimizer.step() outside of the loop, under policy {sync.policy!r}: the "
            f"gradient of {of} was not reduced, as its backward pass came after the "
            "loader's end (list(loader), say) or before its begin, or is of a window; "
            "step inside the loop, drop it (optimizer.zero_grad()), train on alone "
            "after elche.shutdown(), or choose policy 'sync' for what accumulates"
        )
    return (
        f"{of} has a gradient, but no backward pass of this loop since the last step "
        "produced one: gradients that are assigned (torch.autograd.grad), or that a "
        "replayed CUDA graph writes, are not reduced; call loss.backward(), or choose "
        "policy 'async' or 'cadence', which average parameters"
    )
