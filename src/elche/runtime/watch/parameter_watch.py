"""Detection of changes to a model's parameters, cheap enough for every step."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import final

from torch import nn

from elche.torch_internals.held import held_modules, held_parameters

_IS_TRAINED = attrgetter("requires_grad")
_VALUES = methodcaller("values")


@final
class ParameterWatch:
    """Parameters of a model's modules, trained ones marked, when this was made.

    Walking ``model.parameters()`` costs 0.1 ms where there are forty modules. Comparing
    what all of them hold, one after another, with what they held then costs a tenth of
    that, as no line of Python runs for each.

    Args:
        model: the model.

    Attributes:
        parameters: of the model, each once, as it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self._were_trained = list(map(_IS_TRAINED, self.parameters))
        holders = [
            held
            for module in model.modules()
            for held in (held_parameters(module), held_modules(module))
        ]
        self._empty = [held for held in holders if not held]
        self._filled = [held for held in holders if held]
        self._counts = list(map(len, self._filled))
        self._held = list(chain.from_iterable(map(_VALUES, self._filled)))

    @property
    def is_same(self) -> bool:
        """True if nothing has changed; False may also mean that it cannot be told."""
        return (
            list(map(_IS_TRAINED, self.parameters)) == self._were_trained
            and not any(self._empty)
            and list(map(len, self._filled)) == self._counts
            and all(
                map(is_, chain.from_iterable(map(_VALUES, self._filled)), self._held)
            )
        )
