"""Notices a change of what a model trains, cheaply enough for every step."""

from __future__ import annotations

from typing import final

from torch import nn


@final
class ParameterWatch:
    """What a model's modules held, and what of it was trained, when this was made.

    Walking ``model.parameters()`` costs 0.1 ms where there are forty modules; comparing
    what each of them holds with what it held costs a fifth of that.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())  # kept: nothing else gets their ids
        self._held = [
            (held, [id(value) for value in held.values()])
            for module in self._modules
            for held in (module._parameters, module._modules)
        ]
        self._trained = [(p, p.requires_grad) for p in model.parameters()]

    @property
    def is_same(self) -> bool:
        """Whether nothing has changed; False may also mean that it cannot be told."""
        for parameter, was_trained in self._trained:
            if parameter.requires_grad != was_trained:
                return False
        return all([*map(id, held.values())] == ids for held, ids in self._held)
