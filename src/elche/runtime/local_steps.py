"""What this rank's own steps make of the model, and how they are taken back.

Only while batches are watched one by one is anything kept: the trained parameters, the
buffers and the optimizers' states, in host memory where the model is on a device that
may have no room for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

from elche.comm.finite import all_finite
from elche.comm.optimizer_state import forget_state
from elche.runtime.optimizers_seen import OptimizersSeen
from elche.runtime.scaler_skips import ScalerSkips

ACCUMULATES_BELOW = 2 / 3
"""A loop with fewer steps per batch accumulates; one that passes a batch over, which it
finds to be no number itself, has nearly as many steps as batches."""

_State = dict[Any, dict[str, Any]]


@final
class LocalSteps:
    """Counts this rank's steps, and keeps what they have made of the model.

    Args:
        model: what is trained.
        optimizers: those that step it.
        skips: knows whether a GradScaler does.
    """

    def __init__(
        self, model: nn.Module, optimizers: OptimizersSeen, skips: ScalerSkips
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._skips = skips
        self._batches = self._batches_with_step = 0
        self._steps_before = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._states: list[tuple[torch.optim.Optimizer, _State]] = []
        self.has_stepped = False

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for later steps, and no GradScaler skips those."""
        if self._skips.has_scaler:
            return False
        if not self._batches_with_step and self._skips.may_scale:
            return False
        return self._batches_with_step < ACCUMULATES_BELOW * self._batches

    def begin_batch(self) -> None:
        """A loop body begins."""
        self._steps_before = self._optimizers.steps

    def batch_done(self) -> None:
        """The loop body has run."""
        self.has_stepped = self._optimizers.steps != self._steps_before
        self._batches += 1
        self._batches_with_step += self.has_stepped

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that step the model, the one given to `elche.setup` first."""
        return self._optimizers.all()

    def states_in_words(self) -> str:
        """Which optimizers have stepped the model, and for what they hold state."""
        words = []
        for optimizer in self._optimizers.all():
            held = [p for group in optimizer.param_groups for p in group["params"]]
            count = sum(bool(optimizer.state.get(p)) for p in held)
            name = type(optimizer).__name__
            words.append(f"{name} holds state for {count} of {len(held)} parameters")
        return ", ".join(words)

    def forget_states(self, *, only_lost: bool = False) -> None:
        """Takes optimizers back to where they had taken no step.

        Args:
            only_lost: those whose state is not all numbers; False: all of them.
        """
        for optimizer in self._optimizers.all():
            if not only_lost or not _is_finite(optimizer):
                forget_state(optimizer)

    @torch.no_grad()
    def keep(self, *, parameters: bool = True) -> None:
        """Remembers the model and its optimizers as they are.

        Args:
            parameters: False: only the buffers; nothing steps.
        """
        for name, tensor in self._parts(parameters):
            kept = self._tensors.get(name)
            if kept is not None and _is_alike(kept, tensor):
                kept.copy_(tensor)
            else:
                self._tensors[name] = _copied(tensor)
        self._states = [
            (optimizer, _copied(dict(optimizer.state)))
            for optimizer in (self._optimizers.all() if parameters else ())
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Makes them what they were; gradients are gone."""
        for name, tensor in self._parts(True):
            kept = self._tensors.get(name)
            if kept is not None and _is_alike(kept, tensor):
                tensor.copy_(kept)
        for optimizer, state in self._states:
            _restore(optimizer, state)
        known = {id(optimizer) for optimizer, _ in self._states}
        for optimizer in self._optimizers.all() if self._states else ():
            if id(optimizer) not in known:  # it has taken its first steps since
                forget_state(optimizer)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forgets what waits for a step."""
        for parameter in self._model.parameters():
            parameter.grad = None

    def forget(self) -> None:
        """Nothing is kept any more."""
        self._tensors, self._states = {}, []

    def _parts(self, parameters: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """What is trained, and the buffers; both may be others by now."""
        for name, parameter in self._model.named_parameters() if parameters else ():
            if parameter.requires_grad:
                yield name, parameter.detach()
        for name, buffer in self._model.named_buffers():
            yield name, buffer.detach()


def _is_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that it holds are numbers; waits for them."""
    held = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    return all_finite([t for t in tensors if t.is_floating_point() or t.is_complex()])


def _is_alike(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    return kept.shape == tensor.shape and kept.dtype == tensor.dtype


def _copied(value: Any) -> Any:
    """A copy, of tensors in host memory; keys stay what they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(each) for each in value)
    return copy.deepcopy(value)


def _restore(optimizer: torch.optim.Optimizer, kept: _State) -> None:
    for parameter in [p for p in optimizer.state if p not in kept]:
        del optimizer.state[parameter]  # made by a step that is taken back
    for parameter, before in kept.items():
        state = optimizer.state[parameter]
        for name in [name for name in state if name not in before]:
            del state[name]
        for name, value in before.items():
            state[name] = _written(state.get(name), value)


def _written(present: Any, value: Any) -> Any:
    """The value, in the memory that holds the present one where it is a tensor."""
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        if _is_alike(value, present):
            return present.copy_(value)
        return value.to(present.device, copy=True)
    return _copied(value)
