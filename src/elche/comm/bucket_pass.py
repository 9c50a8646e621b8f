"""One reduction of a model's gradients per backward pass, bucket by bucket.

Buckets are filled in the order in which gradients appear (guessed as the reverse of
definition, then as observed in the first backward) and reduced as soon as they are
full, so that all but the last overlap with backward. What is not full when backward
ends (a parameter without a gradient) goes then, so nobody waits for it.

Reductions are out of place: what a rank has stays untouched until every bucket has
arrived. Two bucket sets take turns, so a gradient that is accumulated into a view of
one is read while the other is reduced.

How gradients weigh, and what else is agreed in a pass, is the owner's
(:class:`elche.comm.bucket_contract.Owner`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elche.comm.bucket_contract import Closed, Owner, PassOptions
from elche.comm.buckets import Bucket, BucketInfo, make_buckets
from elche.comm.graph_capture import refuse_capture
from elche.comm.shared_memory import Members
from elche.errors import CommunicationError, ConfigError


class BucketPass:
    """Buckets, hooks and the passes over them. Made by an owner.

    Args:
        parameters: trainable, each once, as defined.
        names: their names.
        group: the process group.
        options: how gradients are packed, sent and handed out.
        owner: decides when and with what weight; held weakly.

    Attributes:
        buckets: in order of reduction.
        order: indices of the parameters in that order.
        passes: passes so far.
        wait_s: seconds of waiting for other ranks since the owner set it to 0.
        launched_early: buckets of the last pass that went before backward had ended.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        group: Members,
        options: PassOptions,
        owner: Owner,
    ) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        self._group = group
        self._options = options
        self._owner = weakref.ref(owner)
        self._index = {id(p): at for at, p in enumerate(self._parameters)}
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._place: dict[int, tuple[Bucket, int]] = {}
        self._handles: list[Any] = []
        self._deferred: list[int] = []
        self._lock = threading.RLock()
        self._observed: dict[int, None] | None = {}
        self._counts: dict[int, int] = {}
        self._expected: dict[int, int] | None = None
        self._unused: frozenset[int] | None = None
        self._given: dict[int, torch.Tensor | None] = {}
        self._kept: list[torch.Tensor | None] = []
        self._problem = ""
        self._broken = ""
        self._scale = 0.0
        self._side = 0
        self._next = 0
        self._summed = 0
        self._is_open = False
        self._awaits_end = False
        self.buckets: list[Bucket] = []
        self.order: list[int] = []
        self.passes = 0
        self.wait_s = 0.0
        self.launched_early = 0

    @property
    def is_open(self) -> bool:
        """Whether a backward pass is under way, or was broken off."""
        return self._is_open

    @property
    def is_ordered(self) -> bool:
        """Whether buckets follow an observed order."""
        return self._observed is None

    @property
    def extra_bytes(self) -> int:
        """Memory of the buckets: what is sent and what is summed, twice each."""
        return 4 * sum(bucket.size_bytes for bucket in self.buckets)

    def infos(self) -> tuple[BucketInfo, ...]:
        """What each bucket holds, in order of reduction."""
        names = {id(p): n for p, n in zip(self._parameters, self._names, strict=True)}
        return tuple(
            bucket.info(
                index,
                self._options.cap_bytes,
                [names[id(p)] for p in bucket.parameters],
            )
            for index, bucket in enumerate(self.buckets)
        )

    def attach(self, order: Sequence[int] | None = None) -> None:
        """Allocates buckets, together with all ranks, and hooks every parameter.

        Args:
            order: of the parameters, where one was observed before; the same on all
                ranks.
        """
        if order is not None:
            self._observed = None
        self._build(order or range(len(self._parameters))[::-1])
        me = weakref.WeakMethod(self._on_gradient)

        def hook(parameter: torch.Tensor) -> None:
            on_gradient = me()
            if on_gradient is not None:
                on_gradient(parameter)

        self._handles = [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter in self._parameters
        ]

    def keep_last(self) -> None:
        """Lets hooks of the user's own run first: what they make of it is reduced."""
        for index in range(len(self._handles)):
            self._runs_last(index)

    def _runs_last(self, index: int) -> bool:
        """Whether no hook of the user's own follows; the next time none will."""
        parameter, handle = self._parameters[index], self._handles[index]
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks")  # noqa: B009
        if not hooks or next(reversed(hooks)) == handle.id or handle.id not in hooks:
            return True
        hooks[handle.id] = hooks.pop(handle.id)  # torch runs them as inserted
        return False

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _build(self, order: Sequence[int]) -> None:
        self.order = list(order)
        parameters = [self._parameters[at] for at in self.order]
        self.buckets = make_buckets(parameters, self._options.cap_bytes)
        for bucket in self.buckets:
            bucket.open(
                self._group,
                staged=self._options.staged,
                keeps_strides=self._options.keeps_strides,
            )
            for index, parameter in enumerate(bucket.parameters):
                self._place[id(parameter)] = bucket, index

    def forget_strides(self) -> None:
        """Before :meth:`attach`: ranks lay their parameters out differently."""
        self._options = replace(self._options, as_views=False, keeps_strides=False)

    def make_static(self) -> None:
        """Takes every backward for one like the first, which has not been yet.

        Raises:
            ConfigError: there was one.
        """
        if self.passes:
            raise ConfigError("a graph is declared static before the first backward")
        self._options = replace(self._options, static_graph=True)

    def expect_unused(self, indices: frozenset[int]) -> None:
        """Says which parameters get no gradient from one of the pass's forwards."""
        self._unused = indices if self._unused is None else self._unused & indices

    def await_end(self) -> None:
        """Called in a backward pass: it closes when that one ends.

        A pass that is opened by a gradient inside a nested backward (reentrant
        checkpointing) would otherwise close when the nested one ends.
        """
        if not self._awaits_end:
            self._awaits_end = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._on_end)

    def run_without_backward(self) -> None:
        """A whole pass with the gradients that are there."""
        self._open()
        self._close()

    def is_given(self, parameter: nn.Parameter) -> bool:
        """Whether ``p.grad`` is what the last pass handed out."""
        given = self._given.get(id(parameter))
        return given is not None and given is parameter.grad

    def rewind(self) -> None:
        """A backward pass was broken off, and its gradients will all come again.

        Buckets that were sent stay sent: their gradients were complete.
        """
        self._awaits_end = False
        self._deferred = []
        self._problem, self._counts = "", {}
        for bucket in self.buckets:
            bucket.pending = self._expected_in(bucket)

    def abandon(self) -> bool:
        """Gives up a pass that an error broke off; whether there was one."""
        was_open, self._is_open, self._awaits_end = self._is_open, False, False
        self._deferred = []
        return was_open

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        owner = self._owner()
        if owner is None or not owner.is_armed:
            return
        with self._lock:  # devices of one module have a thread each
            index = self._index[id(parameter)]
            is_final = self._runs_last(index)
            if is_final:
                self._refuse_gradient(parameter, index)
            if not self._is_open:
                self._open()
            self.await_end()
            if self._observed is not None:
                self._observed.setdefault(index)
            if not is_final:  # hooks registered since the step began come after this
                self._deferred.append(index)
                return
            self._count(index, *self._place[id(parameter)])
            if self._options.strategy == "overlapped":
                self._launch(lambda bucket: not bucket.pending)
                self._sum()

    def _refuse_gradient(self, parameter: torch.Tensor, index: int) -> None:
        gradient = parameter.grad
        if gradient is None:
            raise ConfigError(
                f"{self._names[index]}: a hook took its gradient away before it was "
                "reduced; step after the backward pass"
            )
        if gradient.is_sparse or gradient.layout is not torch.strided:
            raise ConfigError(
                f"{self._names[index]}: its gradient is sparse, which cannot be "
                "reduced; use sparse=False"
            )
        if gradient.requires_grad:
            raise ConfigError(
                f"{self._names[index]}: its gradient came from a backward with "
                "create_graph=True, which a reduction cannot be differentiated "
                "through; use torch.autograd.grad, or put that backward into no_sync() "
                "of a DistributedDataParallel"
            )
        expected = self._dtypes[index]
        if gradient.dtype is not expected:
            raise ConfigError(
                f"{self._names[index]}: expected a gradient of {expected}, as its "
                f"parameter was when buckets were made, got {gradient.dtype}; convert "
                "a model between epochs, on every rank"
            )

    def _count(self, index: int, bucket: Bucket, place: int) -> None:
        """Takes note of a gradient; the bucket is full when none is pending."""
        seen = self._counts[index] = self._counts.get(index, 0) + 1
        if not self._options.static_graph:
            if place not in bucket.pending:
                self._problem = self._problem or (
                    f"{self._names[index]}: a gradient came twice in one backward "
                    "pass, or to a parameter that find_unused_parameters had not "
                    "found in the graph, and too late for the reduction; activation "
                    "checkpointing needs use_reentrant=False (or static_graph=True of "
                    "a DistributedDataParallel)"
                )
            bucket.pending.discard(place)
        elif self._expected is not None and seen >= self._expected.get(index, 0):
            bucket.pending.discard(place)

    def _open(self) -> None:
        refuse_capture()
        if self._broken:
            raise CommunicationError(
                f"an earlier reduction failed ({self._broken}); form a new group with "
                "the ranks that are left"
            )
        owner = self._owner()
        assert owner is not None
        self._side = 1 - self._side
        self._next = self._summed = 0
        self._problem, self._counts = "", {}
        self._is_open = True
        self.passes += 1
        if all(bucket.keeps_contribution for bucket in self.buckets):
            self._kept = []  # here, where a device does not wait for it
        for bucket in self.buckets:
            bucket.pending = self._expected_in(bucket)
        try:
            self._scale = owner.open_pass(self._side)
        except CommunicationError as error:
            self._fail(error)
            raise

    def _expected_in(self, bucket: Bucket) -> set[int]:
        """Places in a bucket that get a gradient in this pass."""
        return {
            place
            for place, parameter in enumerate(bucket.parameters)
            if not self._is_unused(self._index[id(parameter)])
        }

    def _is_unused(self, index: int) -> bool:
        if self._expected is not None:
            return index not in self._expected
        return self._unused is not None and index in self._unused

    def _launch(self, is_ready: Callable[[Bucket], bool]) -> None:
        """Sends what is ready, in the order that all ranks keep."""
        if self._options.static_graph and self._expected is None and self._awaits_end:
            return  # the first pass only counts
        while self._next < len(self.buckets) and is_ready(self.buckets[self._next]):
            self.buckets[self._next].send(self._side, self._scale)
            self._next += 1

    def _sum(self) -> None:
        """Sums what has arrived; in order, as every rank sends in that order."""
        while self._summed < self._next and self.buckets[self._summed].advance():
            self._summed += 1

    def _on_end(self) -> None:
        """End of a backward pass."""
        self._awaits_end = False
        deferred, self._deferred = self._deferred, []
        if self._is_open:
            for index in deferred:
                parameter = self._parameters[index]
                self._refuse_gradient(parameter, index)
                self._count(index, *self._place[id(parameter)])
            self._close()

    def _close(self) -> None:
        """Reduces what is left, waits, and hands out."""
        self._is_open, self._unused = False, None
        self.launched_early = self._next
        try:
            self._launch(lambda bucket: True)
            started_s = time.perf_counter()
            for bucket in self.buckets[self._summed :]:
                bucket.finish(self._side)
            self.wait_s += time.perf_counter() - started_s
            owner = self._owner()
            assert owner is not None
            started_s = time.perf_counter()
            closed = owner.close_pass(self._side)
            self.wait_s += time.perf_counter() - started_s
            if closed.hand_out:
                self._hand_out(closed)
            if self._observed is not None and closed.source is not None:
                self._reorder(closed.source)
        except CommunicationError as error:
            self._fail(error)
            raise
        self._check_graph()

    def _fail(self, error: CommunicationError) -> None:
        self._is_open = False
        self._broken = str(error).splitlines()[0]

    def _hand_out(self, closed: Closed) -> None:
        """Gives every parameter that any rank used its reduced gradient.

        A rank whose gradients weigh nothing drops those that nobody else has.
        """
        kept: list[torch.Tensor | None] = []
        replaces_all = self._options.as_views and closed.source is not None
        with torch.no_grad():
            for bucket in self.buckets:
                if closed.factor != 1.0:
                    bucket.rescale(self._side, closed.factor)
                summed = bucket.summed[self._side]
                if replaces_all and not bucket.missing:  # the usual case, and quick
                    totals = summed[: len(bucket.parameters)]
                    for parameter, total in zip(bucket.parameters, totals, strict=True):
                        kept.append(parameter.grad)
                        parameter.grad = self._given[id(parameter)] = total
                    continue
                used = bucket.used(self._side)
                for index, parameter in enumerate(bucket.parameters):
                    own = parameter.grad
                    kept.append(own)
                    if used[index] and closed.source is not None:
                        parameter.grad = self._reduced(parameter, summed[index])
                    elif not self.is_given(parameter):
                        parameter.grad = None
                    self._given[id(parameter)] = parameter.grad
        self._kept = kept if self._options.as_views else []

    def _reduced(self, parameter: nn.Parameter, total: torch.Tensor) -> torch.Tensor:
        if self._options.as_views:
            return total
        own = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
        return own.copy_(total)

    def _reorder(self, source: int) -> None:
        """Orders buckets as gradients appeared on one rank in the first backward."""
        assert self._observed is not None
        order = torch.zeros(len(self._parameters), dtype=torch.int64, device="cpu")
        if self._group.rank == source:
            seen = list(self._observed)
            unseen = [at for at in range(len(order)) if at not in self._observed]
            order = torch.tensor(seen + unseen, device="cpu")
        from_rank(self._group, order, "agreeing on the order of gradients")
        self._observed = None
        self._build(order.tolist())

    def _check_graph(self) -> None:
        """Raises what was found in the pass, now that it has been completed."""
        static = self._options.static_graph
        if static and self._expected is None and self._counts:
            self._expected = dict(self._counts)
        elif static and self._expected is not None and self._counts:
            for index in sorted({*self._counts, *self._expected}):
                now, first = self._counts.get(index, 0), self._expected.get(index, 0)
                if now != first:
                    self._problem = self._problem or (
                        f"static_graph=True, but {self._names[index]} got {now} "
                        f"gradients in this backward and {first} in the first one"
                    )
        if self._problem:
            raise ConfigError(self._problem)


def from_rank(group: Members, tensor: torch.Tensor, what: str) -> None:
    """Copies one rank's integers to all: the others must hold zeros."""
    group.all_reduce(tensor, what)
