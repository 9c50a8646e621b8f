"""One reduction of a model's gradients per backward pass, bucket by bucket.

Buckets are filled in the order in which gradients appear (reverse order of definition
at first, then as observed in the first backward). They are reduced as soon as they are
full, so that all but the last overlap with backward. Incomplete buckets (a parameter
without a gradient) are sent at the end of backward, so no rank waits for them.

Reductions are out of place. A rank's contributions stay until all ranks have all sums.
Its gradients stay until every bucket has arrived, except for large ones that the
contribution holds: they are dropped, and restored if the pass is repeated. If a sum is
formed in the contribution's memory, the gradients stay until the first sum of the next
pass: every rank contributes to that only after it has all sums of this pass. Each
pass's sums lie in newly lent memory, so a view of an old sum stays readable meanwhile.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import Bucket, PassOptions, give_back_freed
from elche.comm.gradients.buckets.bucket_queue import (
    BucketQueue,
    GradientOrder,
    Reduced,
    formats_agree,
)
from elche.comm.gradients.gradient_hooks import (
    GradientHooks,
    at_backward_end,
    refuse_gradient,
)
from elche.comm.gradients.part_weights import PartWeights
from elche.comm.transport.process_group import Group
from elche.devices.choice import CPU
from elche.devices.streams import record_event, refuse_capture
from elche.errors import CommunicationError, ConfigError, RankLostError


class Phase(Enum):
    """Progress of a pass.

    =======  ==================================  =================================
    phase    entered by                          left by
    =======  ==================================  =================================
    IDLE     the last pass has closed            the first gradient: OPEN
    OPEN     the first gradient                  the end of backward: CLOSING
    REWOUND  `rewind`, after an error            the first gradient: OPEN
    CLOSING  the end of backward: sums are due   all sums are here: IDLE
    TAKEN    another rank's sums were adopted    publishing them: IDLE
    BROKEN   a reduction has failed              nothing: the ranks may differ
    =======  ==================================  =================================

    A backward pass that raises stays OPEN; the owner refuses it unless it rewinds it. A
    rank's death while CLOSING leads back to CLOSING in the next group, or to TAKEN if a
    survivor has all sums.
    """

    IDLE = "no pass"
    OPEN = "in backward"
    REWOUND = "to be run again"
    CLOSING = "waiting for sums"
    TAKEN = "sums adopted from another rank"
    BROKEN = "failed"


class BucketPass(ABC):
    """Buckets, hooks and the passes over them; a subclass defines the weights.

    Args:
        parameters: trainable parameters, each once, in order of definition.
        names: names of the parameters.
        group: process group of all ranks.
        options: options of packing and sending.
        reduced: record of the gradients that are sums.
        weights: weights of this rank's gradients.

    Attributes:
        parameters: trainable parameters, in order of definition.
        weights: weights of this rank's gradients, set up before :meth:`attach`.
        order: indices of the parameters in the order of reduction.
        backward_passes: number of passes begun so far.
        closed_passes: number of passes whose sums this rank has.
        on_lost: callback that regroups the survivors after a rank's death; None: the
            reduction fails.
        wait_s: seconds of this step spent only on waiting for other ranks.
        work_s: seconds of this step in which backward hooks packed and summed.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        group: Group,
        options: PassOptions,
        reduced: Reduced,
        weights: PartWeights,
    ) -> None:
        self.parameters = list(parameters)
        self._names = list(names)
        self._group = group
        self._options = options
        self._reduced = reduced
        self.weights = weights
        self._holds = False
        self._index = {id(p): at for at, p in enumerate(self.parameters)}
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self._devices = {each.device for each in self.parameters} - {CPU}
        self._computed: list[torch.Event] = []
        self._queue = BucketQueue(reduced)
        self._order = GradientOrder(self._names)
        self._hooks = GradientHooks(self.parameters)
        self._deferred: tuple[int, bool] | None = None
        self._lock = threading.RLock()
        self._phase = Phase.IDLE
        self._broken = ""
        self._scale = 0.0
        self._is_own = False
        self._next_order: list[int] | None = None
        self.order: list[int] = []
        self.backward_passes = self.closed_passes = 0
        self._passes_before = 0  # the step
        self.on_lost: Callable[[], None] | None = None
        self.wait_s = self.work_s = 0.0

    @abstractmethod
    def open_pass(self) -> float:
        """Opens a pass; returns the factor of this rank's gradients."""

    @abstractmethod
    def close_pass(self) -> float:
        """Closes a pass that has all sums; agrees on their factor and returns it."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Buckets in order of reduction."""
        return self._queue.buckets

    @property
    def extra_bytes(self) -> int:
        """Bytes of the buckets in addition to plain training's gradients."""
        kept = int(self._options.keeps_strides)
        return sum(bucket.extra_bytes(kept) for bucket in self.buckets)

    def attach(self) -> None:
        """Allocates buckets and hooks every parameter; a collective call.

        Raises:
            ConfigError: there is no parameter.
        """
        if not self.parameters:
            raise ConfigError("the model has no parameter that requires a gradient")
        if not formats_agree(self.parameters, self._group):
            self._options = replace(self._options, keeps_strides=False)
        self.weights.attach()
        self._build(range(len(self.parameters))[::-1])
        self._hooks.attach(partial(self._on_gradient, weakref.ref(self)))

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        self.weights.detach()
        self._hooks.detach()

    def _build(self, order: Sequence[int]) -> None:
        self.order = list(order)
        self._queue.build(self.parameters, self.order, self._group, self._options)

    def run_without_backward(self) -> None:
        """Runs a whole pass with the current gradients."""
        self._open()
        self._close()

    def rewind(self) -> None:
        """Prepares to rerun the step's aborted forward or backward pass.

        Buckets that were sent stay sent, so the rerun must use the same samples.

        Raises:
            CommunicationError: the step had been reduced.
        """
        is_open = self._phase in (Phase.OPEN, Phase.REWOUND)
        if self.backward_passes > self._passes_before and not is_open:
            raise CommunicationError(
                "a step failed after its gradients had been reduced, so it cannot be "
                "repeated"
            )
        if self._phase is Phase.OPEN:
            self._phase = Phase.REWOUND
        self._deferred = None
        self._order.begin()
        self._queue.expect()

    @staticmethod
    def _on_gradient(of: weakref.ref[BucketPass], parameter: torch.Tensor) -> None:
        """Handles a new gradient; the hook may outlive its wrapper."""
        self = of()
        index = None if self is None else self._index.get(id(parameter))
        if self is None or index is None:
            return  # not a parameter but an earlier hook's result, which torch refuses
        if self._is_own and self._phase is Phase.OPEN:
            came = self._order.came
            came[index] = came.get(index, 0) + 1
            return
        if self.weights.part is None:
            self._reduced.strays.add(id(parameter))
            return
        if self._holds:
            return
        with self._lock:  # devices of one module have a thread each
            is_undefined = parameter.grad is None and not self._hooks.was_taken(index)
            if self._phase is not Phase.OPEN and not self._begin(index):
                self._deferred = index, is_undefined
                return
            self._take(index, is_undefined)

    def _begin(self, index: int) -> bool:
        """Begins a pass at its first gradient; False if a user hook still follows.

        That hook was registered after the step began. On other parameters user hooks
        run first.
        """
        if self._phase is not Phase.REWOUND:
            self._open()
        self._phase = Phase.OPEN
        at_backward_end(self._on_end)
        return self._is_own or self._hooks.keep_last(index)

    def _take(self, index: int, is_undefined: bool) -> None:
        """Counts a gradient, and sends its bucket once none is pending."""
        order, queue = self._order, self._queue
        order.came[index] = order.came.get(index, 0) + 1
        if self._is_own:
            return
        gradient = self.parameters[index].grad
        if gradient is not None or not is_undefined:
            refuse_gradient(gradient, self._names[index], self._dtypes[index])
        bucket, place = queue.places[index]
        if not order.is_agreed:
            order.last.pop(index, None)  # of several gradients the last one counts
            order.last[index] = None
        if place not in bucket.pending:
            if any(bucket is sent for sent in queue.buckets[: queue.sent]):
                order.late.add(index)
        elif index not in order.several:
            bucket.pending.discard(place)
        has_work = not bucket.pending or queue.summed < queue.sent
        if has_work:
            drops = order.is_agreed and self._options.keeps_strides
            first = self.parameters[next(iter(order.came))] if drops else None
            started_s = time.perf_counter()
            queue.advance(self._scale, first)
            self.work_s += time.perf_counter() - started_s

    def _open(self) -> None:
        if self._devices:
            refuse_capture()
        if self._phase is Phase.BROKEN:
            raise CommunicationError(
                f"an earlier reduction failed ({self._broken}); form a new group with "
                "the ranks that are left"
            )
        self._queue.begin()
        self._order.begin()
        self._phase = Phase.OPEN
        self.backward_passes += 1
        try:
            self._enter()
        except CommunicationError as error:
            self._fail(error)
            raise

    def _enter(self) -> None:
        """Opens the pass once all ranks have read the last sums.

        Retries in the next group if ranks die meanwhile.
        """
        while self._phase is not Phase.TAKEN:
            try:
                self._scale = self.open_pass()
                # The first pass refuses gradients that a larger group cannot reduce.
                is_alone = self._group.world_size == 1 and self._scale == 1.0
                self._is_own = is_alone and self.closed_passes > 0
                started_s = time.perf_counter()
                self._queue.reclaim()
                self.wait_s += time.perf_counter() - started_s
                return
            except RankLostError:
                if self.on_lost is None:
                    raise
            self.on_lost()

    def _on_end(self) -> None:
        """Closes the pass at the end of backward."""
        if self._phase is not Phase.OPEN:  # it was rewound
            return
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            self._take(*deferred)
        self._close()

    def _close(self) -> None:
        """Reduces remaining buckets, waits, and publishes the sums."""
        self._phase = Phase.CLOSING
        self._computed = [*map(record_event, self._devices)]
        try:
            self._reduce_rest()
        except CommunicationError as error:
            self._fail(error)
            raise
        finally:
            if self._phase is not Phase.BROKEN:
                self._phase = Phase.IDLE
        if self._order.late:
            self._order.refuse_late()

    def _await_own(self) -> float:
        """Waits for this rank's devices, which the host is ahead of; returns seconds.

        Otherwise their computing time would count as a wait for other ranks.
        """
        started_s = time.perf_counter()
        computed = self._computed
        self._group.wait_until(
            lambda: all(each.query() for each in computed), "its own gradients"
        )
        return time.perf_counter() - started_s

    def _reduce_rest(self) -> None:
        """Sends remaining buckets, waits for all sums, and publishes them.

        If ranks die meanwhile, repeats without them or copies a survivor's sums.
        """
        started_s, factor = time.perf_counter(), None
        while self._phase is not Phase.TAKEN:
            try:
                if not self._is_own:
                    self._queue.send_rest(self._scale)
                    if self._computed:
                        started_s += self._await_own()
                    self._queue.finish()
                    if not self._order.is_agreed:
                        self._end_first()
                factor = self.close_pass()
                break
            except RankLostError:
                if self.on_lost is None:
                    raise
            self.on_lost()
            self._enter()
        self.wait_s += time.perf_counter() - started_s
        if factor is None:  # another rank's sums are published
            return
        self.closed_passes += 1
        if self._is_own:
            self._queue.publish_own(self.parameters, factor)
            return
        if self._options.codec != "fp32":
            self._queue.settle()
        self._queue.publish(factor)
        if self._next_order is not None:
            self._reorder(self._next_order)
            self._next_order = None

    def reduce_in(
        self, group: Group, source: int | None, *, lacks: bool, factor: float
    ) -> None:
        """Continues in the group of the survivors; a collective call.

        If ``source`` holds the sums of the last pass, the others copy them. If no rank
        holds all of them, the pass is reduced again from the kept gradients.

        Args:
            group: group of the survivors.
            source: place of a rank with the last pass's sums; None: all have them.
            lacks: True if this rank lacks those sums.
            factor: factor of the sums.
        """
        if source is not None:
            self._queue.adopt_sums(group, source, lacks=lacks)
        if lacks:
            self._queue.publish(factor)
            self.closed_passes += 1
            if self._phase is Phase.CLOSING:
                self._phase = Phase.TAKEN
            if not self._order.is_agreed:
                self._order.learn()
        elif self._phase is Phase.CLOSING:
            for bucket in self._queue.buckets:
                bucket.restore(self._scale)
        self._group = group
        if self._order.is_alike(group):  # by now all have the sums of the last pass
            self._build(self.order)
        else:  # some ranks have not agreed on the order yet
            self._order.is_agreed = False
            self._build(range(len(self.parameters))[::-1])

    def _fail(self, error: CommunicationError) -> None:
        self._phase = Phase.BROKEN
        self._broken = str(error).splitlines()[0]

    def _end_first(self) -> None:
        """Agrees on the order of gradients observed by the first rank with any.

        Buckets sent before all their gradients had arrived, on any rank, are sent
        again. After the agreement all ranks have read the first sum.
        """
        self._next_order = None
        late, order = self._order.agree(self._group)
        self._queue.send_again(late, self._scale)
        if order is not None:
            self._order.learn()
            self._next_order = order

    def _reorder(self, order: Sequence[int]) -> None:
        """Rebuilds the buckets once all ranks have closed the first pass.

        Until then, a rank that lacks the sums can copy them from the old buckets. If a
        rank dies here, the order is observed again.
        """
        try:
            closed = torch.zeros(1, device="cpu")
            self._group.all_reduce(closed, "ending the first backward pass")
            self._order.settle()
            self._build(order)
        except RankLostError:
            if self.on_lost is None:
                raise
            self.on_lost()
        give_back_freed()
