"""Refusal of late backward passes through forward passes that no hook has seen.

A model that was compiled after `elche.setup`, or is called by another method than its
forward pass, calls no hook. Autograd numbers its nodes as they are made, so one that is
older than the batch in hand shows that the next batch was asked for first.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, final

import torch

from elche.errors import ConfigError
from elche.torch_internals.passes import backward_roots, node_number

MOST_NODES = 256
"""So many are looked at, from the loss on, for one that takes a parameter."""


@final
class UnseenForwards:
    """Compares the graph of a backward pass with the batch in hand; for one thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._leaf = torch.zeros((), requires_grad=True, device="cpu")
        self._handed_out: int | None = None

    def begin(self, *, is_watched: bool) -> None:
        """A batch is handed out.

        Args:
            is_watched: its forward passes may be unseen.
        """
        self._handed_out = None
        if is_watched:
            with torch.enable_grad():
                self._handed_out = node_number(self._leaf.view(()).grad_fn)

    def check(self) -> None:
        """Called in a backward pass that came to no forward pass that was seen.

        Raises:
            ConfigError: its graph is older than the batch in hand.
        """
        if self._handed_out is None:
            return
        made = _made([root.grad_fn for root in backward_roots(self._thread)])
        if made is not None and made < self._handed_out:
            raise ConfigError(
                "a backward pass came after the next batch was asked for, through a "
                "forward pass that elche has not seen, so that the weight of its "
                "gradients is not known: call loss.backward() before the next batch, "
                "or let elche see it: torch.compile before elche.setup, and the model "
                "called as model(...)"
            )


def _made(roots: list[Any]) -> int | None:
    """The number of the node nearest to a loss that takes a parameter."""
    nodes, seen = deque(node for node in roots if node is not None), 0
    while nodes and seen < MOST_NODES:
        node, seen = nodes.popleft(), seen + 1
        below = [each for each, _ in node.next_functions if each is not None]
        if any(hasattr(each, "variable") for each in below):
            return node_number(node)
        nodes += below
    return None
