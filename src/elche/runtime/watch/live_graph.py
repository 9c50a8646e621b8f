"""Watch over which batch a backward pass is of: the one of its forward pass.

A *live graph* is that of a forward pass of the model whose backward pass has not come.
A loop that asks for the next batch while there is one gets gradients of an earlier
batch than the one in hand (nanoGPT's does, to load while the device computes):

    fetch 0, forward 0, fetch 1, backward 0, forward 1, fetch 2, backward 1, ...

A hook on what the model returns tells, which autograd calls before any gradient of
that graph is there. A container without a forward pass (a ``ModuleList``) is called by
its parts. Gradients of a forward pass that was not seen count as those of the batch in
hand, and `UnseenForwards` refuses what is older.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elche.comm.tensors.nested import outputs_in
from elche.errors import ConfigError
from elche.runtime.watch.unseen_forward import UnseenForwards
from elche.torch_internals.passes import graph_task_id

OnLate = Callable[[Any, Any], None]
"""Called when a backward pass comes to the graph of an earlier batch than the one in
hand, with that batch, and the one that the pass has come to before, or None."""

ITERATED_ELSEWHERE = (
    "the loader is iterated in another thread than the one that trains, but a step "
    "ends where the next batch is asked for: iterate in the thread that trains; the "
    "DataLoader's num_workers= loads ahead"
)


@final
class LiveGraph:
    """Watches the forward and backward passes of a model inside epochs.

    Args:
        model: what the loop calls.

    Attributes:
        thread: that iterates over the loader, and is to train; 0 for any.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._on_late: OnLate | None = None
        self._in_hand: _BatchForwards | None = None
        self._last: _BatchForwards | None = None
        self._task = -1
        self._pass_of: _BatchForwards | None = None
        self._moves = 0
        self._policy = ""
        self._unseen = UnseenForwards()
        self._has_come = False
        self.thread = 0

    @property
    def is_live(self) -> bool:
        """Whether no backward pass has come to the batch of the last forward pass."""
        return self._last is not None and not self._last.had_backward

    @property
    def live_batch(self) -> Any:
        """The one of the last forward pass, if no backward pass has come to it."""
        return self._last.batch if self._last is not None and self.is_live else None

    @property
    def has_graph(self) -> bool:
        """Whether a forward pass of the batch in hand has made a graph."""
        return self._in_hand is not None and self._last is self._in_hand

    def begin_epoch(self, on_late: OnLate | None) -> None:
        """Batches will come; ``on_late`` is told of late backward passes."""
        self.end_epoch()
        self._on_late = on_late
        hook = _ForwardHook(self)
        self._handles = [
            module.register_forward_hook(hook) for module in _called(self._model)
        ]

    def begin(self, batch: Any) -> None:
        """A batch is handed out: forward passes from now on are of it."""
        was_seen = self._in_hand is not None and self._last is self._in_hand
        self._unseen.begin(is_watched=not was_seen)
        self._in_hand = _BatchForwards(self, batch, self._moves)

    def end_epoch(self) -> None:
        """No batch is in hand; what is live may still have its backward pass."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._in_hand = None

    def forget(self) -> None:
        """The run is over."""
        self.end_epoch()
        self._on_late = self._last = self._pass_of = None

    def moved(self, policy: str) -> None:
        """The model is another one for what is live, whose backward pass is refused."""
        self._moves += 1
        self._policy = policy

    def refuse_unseen(self) -> None:
        """At the end of a backward pass whose gradients the batch in hand weighs.

        Raises:
            ConfigError: it is of an earlier batch, which no hook has shown.
        """
        has_come, self._has_come = self._has_come, False
        if not has_come:
            self._unseen.check()

    def after_forward(self, output: Any) -> None:
        """The model has returned something."""
        batch = self._in_hand
        if batch is None or graph_task_id() != -1:  # recomputed, for a checkpoint
            return
        outputs = (output,) if isinstance(output, torch.Tensor) else outputs_in(output)
        for tensor in outputs:
            node: Any = tensor.grad_fn
            if node is not None:
                if self.thread not in (0, threading.get_ident()):
                    raise ConfigError(ITERATED_ELSEWHERE)
                node.register_prehook(batch)
                self._last = batch

    def before_backward(self, batch: _BatchForwards) -> None:
        """A backward pass has come to what the model returned for a batch.

        Raises:
            ConfigError: the model was another one then.
        """
        if batch.moves != self._moves:
            raise fetched_too_early(self._policy)
        self._has_come = True
        task = graph_task_id()
        other = self._pass_of if task == self._task else None
        is_known, batch.had_backward = batch.had_backward, True
        if other is batch or (other is not None and is_known):
            return
        if other is None:
            self._task, self._pass_of = task, batch
            if batch is self._in_hand:
                return
        if self._on_late is not None:
            self._on_late(batch.batch, None if other is None else other.batch)


@final
class _BatchForwards:
    """The forward passes of one batch; autograd calls it when it comes to one.

    Attributes:
        batch: as it was handed out.
        moves: how often the model had become another one.
        had_backward: a backward pass has come.
    """

    def __init__(self, watch: LiveGraph, batch: Any, moves: int) -> None:
        self._watch = weakref.ref(watch)
        self.batch = batch
        self.moves = moves
        self.had_backward = False

    def __call__(self, gradients: Any) -> None:
        if (watch := self._watch()) is not None:
            watch.before_backward(self)


@final
class _ForwardHook:
    """What the model holds; nothing in its copies, and in one that was saved.

    Args:
        watch: told about every output; None: nobody is.
    """

    def __init__(self, watch: LiveGraph | None = None) -> None:
        self._watch = None if watch is None else weakref.ref(watch)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._watch is None or torch.compiler.is_compiling():
            return  # the hook of a module that is compiled in place is traced
        if (watch := self._watch()) is not None:
            watch.after_forward(output)

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """The model, or what a loop calls instead of it where it is a container."""
    if "forward" in vars(model) or type(model).forward is not nn.Module.forward:
        yield model
        return
    for child in model.children():
        yield from _called(child)


def fetched_too_early(policy: str) -> ConfigError:
    """The error of a loop whose backward pass comes when a window has ended."""
    return ConfigError(
        "the next batch was asked for before the backward pass of the last one, and "
        f"under policy {policy!r} a window ends where a batch is asked for, which "
        "changes parameters between a forward pass and its backward pass: swap the two "
        "lines, loss.backward() first and then the next batch (x, y = next(batches), "
        "say), or choose policy 'sync'"
    )
