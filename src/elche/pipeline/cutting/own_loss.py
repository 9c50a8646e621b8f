"""The loss that a traced model computes itself, as transformers' do from `labels`.

It is a mean over the labels that the model does not ignore, and which of them reach the
cross entropy (shifted ones in causal language models) is known from the trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from elche.pipeline.cutting.arguments import Arguments
from elche.torch_internals.batches import tree_map

IGNORED = -100
"""Label that losses ignore by default."""
_aten = torch.ops.aten
_OPERATOR = type(_aten.mse_loss.default)
_BY_SAMPLES = (
    _aten.mse_loss.default,
    _aten.l1_loss.default,
    _aten.binary_cross_entropy_with_logits.default,
)


@final
@dataclass(frozen=True)
class OwnLoss:
    """Loss function of a pipeline with ``loss_fn=None``.

    Attributes:
        arguments: arguments of the model's trace.
        labels: makes the labels of the arguments' tensors; None if the loss is a mean
            over samples.
        used: names of the arguments that `labels` reads.
        fault: why the mean is unknown; "" if it is known.
    """

    arguments: Arguments
    labels: fx.GraphModule | None = None
    used: frozenset[str] = frozenset()
    fault: str = ""

    def __call__(self, output: Any, target: None = None) -> Any:
        """The ``"loss"`` in the model's output; None without one."""
        return output.get("loss") if isinstance(output, Mapping) else None

    def count(self, batch: Any, keywords: Mapping[str, Any]) -> float | None:
        """Number of labels that a microbatch's loss is a mean over.

        Returns:
            The number; None for a mean over samples, and without labels.
        """
        args = batch if isinstance(batch, tuple) else (batch,)
        if isinstance(batch, dict):
            args, keywords = (), {**batch, **keywords}
        named = self.arguments.named(args, keywords)
        if self.labels is None or any(named.get(name) is None for name in self.used):
            return None
        read = [n in self.used and named[n].cpu() for n in self.arguments.owners()]
        return float((self.labels(*read) != IGNORED).sum())


def find_own_loss(graph: fx.Graph, output: Any, arguments: Arguments) -> OwnLoss | None:
    """Finds the loss in a traced model's output, and what it is a mean over.

    Args:
        graph: the trace.
        output: structure of the model's output.
        arguments: arguments of the trace.
    """
    ends = iter(next(node for node in graph.nodes if node.op == "output").args[0])
    loss = OwnLoss(arguments)(tree_map(lambda _: next(ends), output))
    if loss is None:
        return None
    is_plain = not (loss.args[2:] or loss.kwargs)  # a mean, without weights
    if is_plain and loss.target in _BY_SAMPLES:
        return OwnLoss(arguments)
    fault = f"this one ends in {loss.target}"
    if not is_plain or loss.target != _aten.cross_entropy_loss.default:
        return OwnLoss(arguments, fault=fault)
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    made.graph_copy(graph, copies)
    made.output(copies[loss.args[1]])
    # Without the test dropout and switches of modes would stay, with all before them.
    made.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    inputs = [node for node in made.nodes if node.op == "placeholder"]
    for node in made.nodes:
        is_known = node in inputs or node.op == "output"
        if not is_known and not isinstance(node.target, _OPERATOR):
            return OwnLoss(arguments, fault=f"{fault} over what {node} makes")
        node.meta = {}  # it would keep the trace alive
        node.args = fx.node.map_aggregate(node.args, _on_cpu)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _on_cpu)
    pairs = zip(arguments.owners(), inputs, strict=True)
    used = frozenset(name for name, node in pairs if node.users)
    return OwnLoss(arguments, fx.GraphModule({}, made), used)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
