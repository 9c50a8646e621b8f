"""Guard: each parameter gets its gradient once per microbatch, or the step fails.

For every microbatch of a stage the guard tracks which parameters received a
contribution: their ``grad`` has changed, or is deferred to W. If one is missing, the
guard searches the microbatch's graph for its parameter. It is an error, a lost
gradient, if the stage's outputs depend on the parameter. It is not an error without
this dependency (an expert without tokens), or if autograd reached the parameter without
a gradient (a backward returned None).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from elche.errors import ContributionError
from elche.torch_internals.held import accumulated_hooks, version


class _Came(list[torch.Tensor]):
    """Parameters reached by autograd; the hook is its ``append`` (no Python code)."""

    only_counts = True  # so that this hook does not prevent deferral


@final
class ContributionGuard:
    """Counts the contributions to the parameters of one stage.

    Args:
        stage: index of the stage, for messages.
        parameters: the stage's trainable parameters by name.
        schedule: name of the schedule, for messages.
    """

    def __init__(
        self, stage: int, parameters: Mapping[str, nn.Parameter], schedule: str
    ) -> None:
        self._stage, self._schedule = stage, schedule
        self._names = {id(one): name for name, one in parameters.items()}
        self._parameters = {id(one): one for one in parameters.values()}
        self._came = _Came()
        self._owed: dict[int, set[int]] = {}
        self._versions: dict[int, Any] = {}
        self._handles = [
            one.register_post_accumulate_grad_hook(self._came.append)  # runs no Python
            for one in parameters.values()
        ]

    def detach(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin_step(self) -> None:
        """Resets the counts, including those of an abandoned step."""
        self._owed.clear()
        self._changed()

    def begin_backward(self) -> None:
        """Discards hook calls that came from outside the stage's backward."""
        self._came.clear()

    def after_backward(
        self, microbatch: int, roots: Sequence[Any], deferred: Iterable[torch.Tensor]
    ) -> None:
        """Checks a microbatch after its backward; weight gradients may be deferred.

        `roots` has the autograd nodes of the outputs, `deferred` the weights and biases
        with deferred gradients.

        Raises:
            ContributionError: a parameter got several gradients, or none although an
                output depends on it.
        """
        # The hook also runs if autograd had no gradient to accumulate.
        came = Counter(id(one) for one in self._came)
        twice = [key for key, count in came.items() if count > 1]
        if twice and not any("CheckpointFunction" in n.name() for n in _nodes(roots)):
            # not from reentrant checkpointing, which runs a nested backward
            self._complain(twice, microbatch, "got more than one contribution")
        owed = _leaves(deferred) & self._parameters.keys()
        missing = {
            key
            for key in self._parameters.keys() - self._changed() - owed
            # A user's hook may have removed the gradient.
            if not (key in came and has_user_hooks(self._parameters[key]))
        }
        lost = missing and missing & _owing(roots, came)
        if lost:
            self._complain(lost, microbatch, "got no contribution")
        self._owed[microbatch] = owed

    def after_own_input(self, microbatch: int) -> None:
        """Records the weight gradients that a user's own split backward left to W."""
        self._owed[microbatch] = self._parameters.keys() - self._changed()

    def after_weight(self, microbatch: int) -> None:
        """Checks a microbatch whose weight gradients have been computed.

        Raises:
            ContributionError: a pending weight gradient was not computed.
        """
        lost = self._owed.pop(microbatch) - self._changed()
        if lost:
            self._complain(lost, microbatch, "got no contribution")

    def end_step(self) -> None:
        """Checks that no weight gradient is pending.

        Raises:
            ContributionError: weight gradients of a microbatch were never computed.
        """
        for microbatch, owed in self._owed.items():
            if owed:
                self._complain(
                    owed, microbatch, "got no contribution (its W never ran)"
                )

    def _changed(self) -> set[int]:
        """Ids of the parameters whose gradient has changed since the last call."""
        before = self._versions
        self._versions = {key: _version(one) for key, one in self._parameters.items()}
        return {key for key, now in self._versions.items() if now != before.get(key)}

    def _complain(self, keys: Iterable[int], microbatch: int, what: str) -> None:
        names = sorted(self._names[key] for key in keys)
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ContributionError(
            f"stage {self._stage}, schedule {self._schedule}, microbatch "
            f"{microbatch}: parameter {shown} {what}, expected exactly one; the "
            "gradients of this step are wrong and must not be applied. Zero them; if "
            "the stage is not changed by hooks or wrappers (DistributedDataParallel "
            "does not work inside a pipeline), this is a bug in elche"
        )


def has_user_hooks(parameter: torch.Tensor) -> bool:
    """True if hooks other than elche's receive a parameter's gradient."""
    hooks = (accumulated_hooks(parameter) or {}).values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return not all(getattr(owner, "only_counts", False) for owner in owners)


def _version(parameter: torch.Tensor) -> Any:
    grad = parameter.grad
    return None if grad is None else (id(grad), version(grad))


def _leaves(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the parameters behind weights that may be views."""
    found = set()
    for one in tensors:
        if one.is_leaf:
            found.add(id(one))
        else:
            found |= _variables(_nodes([one.grad_fn]))
    return found


def _owing(roots: Sequence[Any], came: Iterable[int]) -> set[int]:
    """Ids of the parameters that must receive a gradient from the graph.

    Excludes parameters that autograd reached without a gradient, unless a node has
    deferred it (`elche.pipeline.split_backward.weight_gradients`).
    """
    nodes = _nodes(roots)
    found = _variables(nodes).difference(came)
    for node in nodes:
        found |= _leaves(getattr(node, "owed", ()))
    return found


def _variables(nodes: Iterable[Any]) -> set[int]:
    """Ids of the parameters whose gradients the nodes accumulate."""
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}


def _nodes(roots: Sequence[Any]) -> set[Any]:
    stack = [root for root in roots if root is not None]
    found: set[Any] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [one for one, _ in node.next_functions if one is not None]
    return found
