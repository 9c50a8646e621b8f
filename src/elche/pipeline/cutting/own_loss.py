"""The loss that a traced model computes itself, like transformers models with `labels`.

It is a mean over the labels that the model does not ignore. The trace shows which
labels reach the cross entropy: in causal language models the shifted ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import fx

from elche.pipeline.cutting.arguments import Arguments
from elche.pipeline.trees import flatten

IGNORED = -100
"""Label that losses ignore by default."""


@final
@dataclass(frozen=True)
class OwnLoss:
    """Loss function of a pipeline with ``loss_fn=None``.

    Attributes:
        arguments: arguments of the model's trace.
        labels: function from the arguments' tensors to the labels; None if the loss is
            a mean over samples.
        used: names of the arguments that `labels` reads.
        fault: why the mean is unknown; "" if it is known.
    """

    arguments: Arguments
    labels: fx.GraphModule | None = None
    used: frozenset[str] = frozenset()
    fault: str = ""

    def __call__(self, output: Any, target: None = None) -> Any:
        """Returns ``"loss"`` of the model's output; None without one."""
        return output.get("loss") if isinstance(output, Mapping) else None

    def count(self, batch: Any, keywords: Mapping[str, Any]) -> float | None:
        """Number of labels in the loss's mean; None for a mean over samples."""
        named = self.arguments.of_batch(batch, keywords)
        if self.labels is None or any(named.get(name) is None for name in self.used):
            return None
        given = {name: iter(flatten(named[name], name)[0]) for name in self.used}
        read = [n in given and next(given[n]).cpu() for n in self.arguments.owners]
        return float((self.labels(*read) != IGNORED).sum())
