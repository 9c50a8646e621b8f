"""Hook of every optimizer step, and refusal of steps that ranks do not have in common.

Every step, inside of epochs and outside, is checked for reduced gradients. Changes of
gradients after their reduction are allowed, if all ranks make the same ones. Parameters
outside the model are not reduced. They are allowed if the loop creates them for one
batch, and refused if they are stepped in two batches or are older than the loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from elche.coordination.accounts.step_count import StepCount
from elche.errors import ConfigError
from elche.runtime.rank_settings import foreign_parameters
from elche.runtime.watch.model_copies import instances
from elche.runtime.windows.synchroniser import Synchroniser
from elche.torch_internals.passes import graph_task_id


@final
class StepGuard:
    """Sees every optimizer step of this process, and checks it before it is taken.

    Args:
        model: the trained model.
        given: its optimizers passed to `elche.setup`.
        steps: counts the batches that the loop has taken.

    Attributes:
        synchroniser: record of reduced gradients; None: no step is checked.
        is_inside: the loop is inside an epoch.
        stepped: steps of optimizers so far.
        in_batch: ids of optimizers that have stepped in this batch.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Sequence[torch.optim.Optimizer],
        steps: StepCount,
    ) -> None:
        self._model, self._steps = model, steps
        self._given = list(given)
        self._others: list[weakref.ref[torch.optim.Optimizer]] = []
        self._passes = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._foreign = WeakTensorKeyDictionary()  # batches of first steps
        self._has_begun = False
        self._handle: Any = None
        self.synchroniser: Synchroniser | None = None
        self.is_inside = False
        self.stepped = 0
        self.in_batch: set[int] = set()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the model: the given ones, then others by their first step."""
        if not self._others:
            return [*self._given]
        others = (ref() for ref in self._others)
        return [*self._given, *(each for each in others if each is not None)]

    @property
    def all_have_stepped(self) -> bool:
        """True if every optimizer of the model has stepped in this batch."""
        return self.in_batch.issuperset(map(id, self.optimizers()))

    def attach(self) -> None:
        """Starts watching optimizer steps, unless it watches them already."""
        found = weakref.WeakMethod(self.before_step)

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            before_step = found()
            return before_step and before_step(optimizer, args, kwargs)

        self._handle = self._handle or register_optimizer_step_pre_hook(hook)

    def detach(self) -> None:
        """Stops watching, and releases the run's gradients."""
        self.synchroniser = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def begin_part(self) -> None:
        """Begins a part; existing optimizers' parameters are older than the loop."""
        self.is_inside = True
        if not self._has_begun:
            self._has_begun = True
            for optimizer in instances(torch.optim.Optimizer):
                for group in getattr(optimizer, "param_groups", ()):
                    self._foreign.update(dict.fromkeys(group["params"], -1))

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> Any:
        """Hook before a step, or after each call of the step's closure.

        Raises:
            ConfigError: the step would differ from the other ranks'.
        """
        self.stepped += 1
        self.in_batch.add(id(optimizer))
        if optimizer not in self._passes:
            self._learn(optimizer)
        sync = self.synchroniser
        if sync is None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._check(optimizer, sync)
            return None

        def checked() -> Any:
            loss = closure()
            self._check(optimizer, sync)
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], checked, *args[2:]), others

    def _learn(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps an optimizer that steps for the first time, if it is the model's."""
        self._passes[optimizer] = -1
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        is_given = any(optimizer is each for each in self._given)
        if not is_given and not held.isdisjoint(map(id, self._model.parameters())):
            self._others.append(weakref.ref(optimizer))

    def _check(self, optimizer: torch.optim.Optimizer, sync: Synchroniser) -> None:
        is_inside = self.is_inside
        reduced, windows, own = sync.reduced, sync.windows, sync.own_ids
        if windows is not None:
            windows.refuse_step(optimizer)
        is_new = self._passes[optimizer] != reduced.passes
        self._passes[optimizer] = reduced.passes
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
        """Refuses parameters older than the current batch."""
        now = self._steps.taken
        old = [p for p in foreign if self._foreign.setdefault(p, now) < now]
        if any(_moves(p.grad) for p in old):
            why = foreign_parameters(type(optimizer).__name__, old)
            raise ConfigError(
                f"{why}; create per-batch parameters anew inside the loop"
            )


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
            f"gradient of {of} was not reduced, because its backward pass ran before "
            "or after the loop over the loader (list(loader), say) or in a window; "
            "step inside the loop, drop the gradient (optimizer.zero_grad()), "
            "continue alone after elche.shutdown(), or accumulate under policy 'sync'"
        )
    return (
        f"{of} has a gradient, but no backward pass of this loop since the last step "
        "produced one: gradients that are assigned (torch.autograd.grad), or that a "
        "replayed CUDA graph writes, are not reduced; call loss.backward(), or choose "
        "policy 'async' or 'cadence', which average parameters"
    )
