"""Assignment of forward and backward passes to batches.

A forward pass belongs to the batch whose tensors it reads, views included. If it reads
none of them, it belongs to the newest batch, unless others are possible. So loops may
be ahead:

    fetch 0, forward 0, fetch 1, backward 0, forward 1, ...            (nanoGPT)
    fetch 0, fetch 1, forward 0, backward 0, fetch 2, forward 1, ...   (timm)
    fetch 0, fetch 1, fetch 2, forward 0, backward 0, forward 1, ...   (a group)

A *live graph* belongs to a forward pass whose backward pass has not come. A hook on the
model's outputs detects that pass: autograd calls it before any gradient of the graph
exists. Of a container without a forward pass (``ModuleList``), the parts are called.
Hooks miss some forward passes (of a model compiled after set-up, or called by another
method). These count for the current batch, if no earlier batch has a pending pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from elche.comm.tensors.nested import outputs_in
from elche.errors import ConfigError
from elche.torch_internals.passes import graph_task_id

OnLate = Callable[[Any, Any], None]
"""Called with the batch of a late backward pass, and the batch of its earlier graphs.
A pass is late if it reaches the graph of a batch before the current one; the second
argument is None if it is the pass's first graph."""
UNCLEAR = (
    "the loop fetched batches ahead, or skipped some, and elche cannot tell to which "
    "batch this pass belongs, so its weight is unknown. Call model(...) with the "
    "loader's own tensors (convert them inside forward; torch.compile before "
    "elche.setup), or run forward and backward before the next batch is fetched"
)
ITERATED_ELSEWHERE = (
    "the loader is iterated in another thread than the one that trains: iterate where "
    "you train, and let the DataLoader's num_workers= load ahead"
)


@final
@dataclass(eq=False, slots=True)
class BatchForwards:
    """The forward passes of one batch.

    Attributes:
        batch: label of the batch.
        moves: number of parameter replacements before the batch.
        number: number of the batch, in the order of the run.
        had_forward: a forward pass with a gradient has read the batch.
        had_backward: a backward pass has reached its graph.
        storages: storages of its tensors, without those that another batch shares.
    """

    batch: Any
    moves: int
    number: int
    had_forward: bool = False
    had_backward: bool = False
    storages: list[StorageWeakRef] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """True while something holds a tensor of the batch."""
        return any(not storage.expired() for storage in self.storages)


@final
class LiveGraph:
    """Watches the forward and backward passes of a model inside epochs.

    Args:
        model: model that the loop calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._on_late: OnLate | None = None
        self._on_forward: Callable[[Any], None] | None = None
        # Weak references: freed memory is used again, at addresses that were known.
        self._of: dict[int, tuple[StorageWeakRef, BatchForwards | None]] = {}
        self._most = 64
        self._waiting: list[BatchForwards] = []  # for a backward pass, oldest first
        self._number = self._first = 0  # batches so far, and before this part
        self._is_ahead: bool | None = None  # None: no forward pass in this part yet
        self._current: BatchForwards | None = None
        self._forward: BatchForwards | None = None
        self._last: BatchForwards | None = None
        self._task = -1
        self._pass_of: BatchForwards | None = None
        self._moves = 0
        self._policy = ""
        self._has_come = False
        self.thread = 0  # that iterates over the loader, and is to train; 0: any

    @property
    def is_live(self) -> bool:
        """True if no backward pass has reached the batch of the last forward pass."""
        return self._last is not None and not self._last.had_backward

    @property
    def last_passed(self) -> Any:
        """The batch of the last forward pass, once its backward pass has begun."""
        last = self._last
        return last if last is not None and last.had_backward else None

    @property
    def open_batches(self) -> list[Any]:
        """Batches with a pending backward pass, as far as is known, oldest first."""
        last, may_wait = self._last, self._is_ahead is not False
        return [
            each.batch
            for each in self._waiting
            if not each.had_backward and (each is last or (may_wait and each.is_held))
        ]

    @property
    def has_passed(self) -> bool:
        """True once a forward pass was seen in this part."""
        return self._is_ahead is not None

    @property
    def has_graph(self) -> bool:
        """True once a forward pass of the current batch has made a graph."""
        return self._current is not None and self._last is self._current

    def begin_epoch(
        self,
        on_late: OnLate | None,
        on_forward: Callable[[Any], None] | None = None,
        *,
        continues: bool = False,
    ) -> None:
        """Begins a part; ``on_late`` receives late backward passes.

        Where the loop is ahead, ``on_forward`` receives the batch whose forward pass
        begins, and None at its end; without it nothing is refused.
        ``continues``: a further part of the same loop's epoch.
        """
        self.end_epoch(is_over=True)
        if self._is_ahead is False:  # what has had no pass was skipped
            self._waiting = [each for each in self._waiting if each is self._last]
        if not continues or self._is_ahead:
            self._is_ahead = None
        self._first = self._number
        self._on_late, self._on_forward = on_late, on_forward
        before, after = ModelHook(self.before_forward), ModelHook(self.after_forward)
        for module in _called(self._model):
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]

    def begin(self, batch: Any, data: Any = None) -> None:
        """Records a yielded batch: its label, and the data that the loop receives."""
        self._current = current = BatchForwards(batch, self._moves, self._number)
        self._number += 1
        if len(self._of) >= self._most:
            kept = {k: v for k, v in self._of.items() if not v[0].expired()}
            self._of, self._most = kept, 64 + 2 * len(kept)
        for storage in _storages_in(data):  # one of two batches identifies neither
            _, other = self._of.setdefault(storage.cdata, (storage, current))
            if other is current:
                current.storages.append(storage)
            elif other is not None:
                other.storages.remove(storage)
                self._of[storage.cdata] = storage, None
        waiting, last, is_known = self._waiting, self._last, self._is_ahead is not None
        while waiting and (
            waiting[0].had_backward
            or (is_known and waiting[0] is not last and not waiting[0].is_held)
        ):
            waiting.pop(0)
        waiting.append(current)

    def end_epoch(self, *, is_over: bool = False) -> None:
        """Ends the current batch; open batches keep their hooks unless ``is_over``."""
        self._current = None
        while self._handles and (is_over or not self.open_batches):
            self._handles.pop().remove()

    def allow_looks(self, on_backward: OnLate) -> None:
        """Allows forward passes of fetched batches after a break.

        Args:
            on_backward: refuses their backward passes.
        """
        self._on_late, self._on_forward = on_backward, None

    def forget(self) -> None:
        """Releases all batches and hooks, at the end of the run."""
        self.end_epoch(is_over=True)
        self._waiting.clear()
        self._on_late = self._on_forward = None
        self._current = self._forward = self._last = self._pass_of = None

    def moved(self, policy: str) -> None:
        """Invalidates live graphs, whose parameters have changed."""
        self._moves += 1
        self._policy = policy

    def refuse_unseen(self) -> None:
        """Refuses a backward pass that no forward pass of the current batch explains.

        Raises:
            ConfigError: it is, or may be, of an earlier batch that no hook has seen.
        """
        has_come, self._has_come = self._has_come, False
        if has_come:
            return
        if (batch := self._untold()) is not None:
            batch.had_forward = batch.had_backward = True

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A hook before a forward pass.

        Raises:
            ConfigError: the batch is not known.
        """
        if graph_task_id() != -1:  # recomputed by checkpointing
            return
        batch, current = None, self._current  # the newest that has one of the tensors
        for storage in _storages_in((*args, *kwargs.values())):
            _, of = self._of.get(storage.cdata, (None, None))
            if of is not None and (batch is None or of.number > batch.number):
                batch = of
        if not torch.is_grad_enabled():
            self._forward = None
            if batch is not None and batch is current and self._is_ahead is None:
                self._is_ahead = False
            return
        if self.thread not in (0, threading.get_ident()):
            raise ConfigError(ITERATED_ELSEWHERE)
        is_again = batch is not None and batch.had_backward
        if is_again and not self._is_ahead and not self._is_before(batch):
            batch = current  # an earlier one may be read again, in a step of this one
        if batch is None:
            batch = self._untold()
        elif not is_again:
            self._is_ahead = bool(self._is_ahead) or batch is not current
        self._forward = batch
        is_other = self._is_ahead or batch is not current
        if batch is not None and is_other and self._on_forward is not None:
            self._on_forward(batch.batch)

    def _is_before(self, batch: BatchForwards | None) -> bool:
        """Returns True if the loop is in this batch's step and has fetched the next."""
        if batch is None or self._on_forward is None or batch.number < self._first:
            return False
        return self._current is None or not self._current.had_forward

    def _untold(self) -> BatchForwards | None:
        """The batch of a pass that reads none of the loader's tensors; None: no batch.

        Raises:
            ConfigError: several batches are possible.
        """
        current, is_ahead = self._current, self._is_ahead
        is_new = current is not None and is_ahead is None
        others = [
            b
            for b in self._waiting
            if b is not current and not b.had_forward and b.number >= self._first
            if b.is_held or is_new or (current and not b.storages)
        ]
        if current is not None:
            is_unclear = bool(others) or (is_ahead and self._last is not current)
        else:
            is_unclear = is_ahead is not False and len(others) + bool(is_ahead) > 1
        if is_unclear and self._on_forward is not None:
            raise ConfigError(UNCLEAR)
        if is_new:
            self._is_ahead = False
        return current

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook after a forward pass."""
        batch = self._forward or self._current
        if batch is None or graph_task_id() != -1:
            return
        outputs = (output,) if isinstance(output, torch.Tensor) else outputs_in(output)
        for tensor in outputs:
            node: Any = tensor.grad_fn
            if node is not None:
                node.register_prehook(partial(self.before_backward, batch))
                batch.had_forward = True
                self._last = batch
        is_other = self._is_ahead or batch is not self._current
        if is_other and self._on_forward is not None:
            self._on_forward(None)

    def before_backward(self, batch: BatchForwards, gradients: Any) -> None:
        """A hook of the model's outputs for a batch, called in its backward pass.

        Raises:
            ConfigError: the parameters have changed since the forward pass.
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
            if batch is self._current:
                return
        if self._on_late is not None:
            self._on_late(batch.batch, None if other is None else other.batch)


@final
class ModelHook:
    """Hook that a model holds; empty in copies of the model and in a saved one.

    Args:
        method: called while its object exists; None: never.
    """

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = (lambda: None) if method is None else weakref.WeakMethod(method)

    def __call__(self, *given: Any) -> None:
        """Calls the method, except while a module compiled in place is traced."""
        if not torch.compiler.is_compiling() and (method := self._method()) is not None:
            method(*given)

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return ModelHook, ()


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the model, or the modules that a loop calls of a container."""
    if "forward" in vars(model) or type(model).forward is not nn.Module.forward:
        yield model
        return
    for child in model.children():
        yield from _called(child)


def fetched_too_early(policy: str) -> ConfigError:
    """The error of a loop whose backward pass runs after a window has ended."""
    return ConfigError(
        "the next batch was requested before the backward pass of the last one. Under "
        f"policy {policy!r} a window may end at that request, which changes "
        "parameters between forward and backward: swap the two lines, loss.backward() "
        "first and then the next batch (x, y = next(batches), say), or choose policy "
        "'sync'"
    )


def _storages_in(values: Any) -> list[StorageWeakRef]:
    """Storages of tensors, including those in lists and tuples."""
    storages = []
    for part in values if isinstance(values, list | tuple) else (values,):
        for tensor in (part,) if isinstance(part, torch.Tensor) else outputs_in(part):
            try:
                storages.append(StorageWeakRef(tensor.untyped_storage()))
            except (NotImplementedError, RuntimeError):
                continue  # sparse, or inside of functorch
    return storages
