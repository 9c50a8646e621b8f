"""The loss that a traced model computes itself, as transformers' do from `labels`.

It is a mean over the labels that the model does not ignore, and which of them reach the
cross entropy (shifted ones in causal language models) is known from the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from elche.pipeline.cutting.arguments import Arguments
from elche.torch_internals.batches import tree_map

IGNORED = -100
"""Label that losses ignore by default."""
_aten = torch.ops.aten
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
        names: names of those from which the model makes the labels.
        labels: makes the labels of these; None if the loss is a mean over samples.
        fault: why neither is known; "" if it is.
    """

    arguments: Arguments
    names: Sequence[str] = ()
    labels: fx.GraphModule | None = None
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
        given = [one for name in self.names if (one := named.get(name)) is not None]
        if self.labels is None or len(given) < len(self.names):
            return None
        return float((self.labels(*(one.cpu() for one in given)) != IGNORED).sum())


def find_own_loss(graph: fx.Graph, output: Any, arguments: Arguments) -> OwnLoss | None:
    """Finds the loss in a traced model's output, and what it is a mean over.

    Args:
        graph: the trace.
        output: structure of the model's output.
        arguments: arguments of the trace.
    """
    ends = iter(next(node for node in graph.nodes if node.op == "output").args[0])
    node = OwnLoss(arguments)(tree_map(lambda _: next(ends), output))
    if node is None or (node.target in _BY_SAMPLES and not node.args[2:]):
        return None if node is None else OwnLoss(arguments)
    fault = f"is none of its labels or samples, but ends in {node.target}"
    plain = node.target == _aten.cross_entropy_loss.default and not node.args[2:]
    if not plain or node.kwargs:
        return OwnLoss(arguments, fault=fault)
    made, names = fx.Graph(), list[str]()
    here: dict[fx.Node, fx.Node] = {}
    owners = iter(arguments.owners())
    needed = _ancestors(node.args[1])
    for one in graph.nodes:
        owner = next(owners) if one.op == "placeholder" else ""
        if one not in needed:
            continue
        if not owner and not isinstance(one.target, torch._ops.OpOverload):
            return OwnLoss(arguments, fault=f"{fault} over what {one} makes")
        here[one] = made.node_copy(one, here.__getitem__)
        here[one].meta = {}  # it would keep the trace alive
        here[one].args = fx.node.map_aggregate(here[one].args, _on_cpu)
        here[one].kwargs = fx.node.map_aggregate(here[one].kwargs, _on_cpu)
        names += [owner] if owner else []
    made.output(here[node.args[1]])
    return OwnLoss(arguments, names, fx.GraphModule({}, made))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, waiting = set[fx.Node](), [node]
    while waiting:
        one = waiting.pop()
        waiting += [] if one in found else one.all_input_nodes
        found.add(one)
    return found


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
