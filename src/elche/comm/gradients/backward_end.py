"""Detection of the end of a backward pass, reentrant ones included.

Reentrant activation checkpointing runs a backward pass of its own inside a node of the
one that the loop began, and autograd calls back at the end of each. Gradients are
complete when the outermost has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.hooks import RemovableHandle

from elche.torch_internals.passes import current_node, queue_callback


def at_backward_end(call: Callable[[], None]) -> None:
    """Calls back once, when the backward pass under way and all around it have ended.

    For hooks of gradients. A pass that an error breaks off calls no hook.
    """
    queue_callback(partial(_at_end, call))


def _at_end(call: Callable[[], None]) -> None:
    """A pass has ended; in a node of the one around it, if there is one."""
    around = current_node()
    if around is None:
        call()
        return
    # Only hooks that run in the outer pass can ask to be called at its end: of the
    # nodes that it comes to next, one at least.
    handles: list[RemovableHandle] = []

    def go_on(gradients: Any) -> None:
        while handles:
            handles.pop().remove()
            if not handles:
                at_backward_end(call)

    for node, _ in around.next_functions:
        if node is not None:
            handles.append(node.register_prehook(go_on))
