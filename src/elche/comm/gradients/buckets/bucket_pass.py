"""One reduction of a model's gradients per backward pass, bucket by bucket.

Buckets are filled in the order in which gradients appear (guessed as the reverse of
definition, then as observed in the first backward) and reduced as soon as they are
full, so that all but the last overlap with backward. What is not full when backward
ends (a parameter without a gradient) goes then, so no rank waits for it.

Reductions are out of place: what a rank has stays untouched until every bucket has
arrived, and what it sent until all ranks have all sums: where a sum is formed in what
was sent, this rank's own gradients stay until the first sum of the next pass is there,
to which every rank has sent after it had all sums of this one. A sum lies in memory
that is lent anew in every pass, so a gradient that is accumulated into a view of one is
read while the next is reduced.
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
)
from elche.comm.gradients.buckets.late_sums import LateSums
from elche.comm.gradients.gradient_hooks import (
    GradientHooks,
    at_backward_end,
    refuse_capture,
    refuse_gradient,
)
from elche.comm.gradients.part_weights import PartWeights
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, RankLostError


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

    A backward pass that raises never ends: its pass stays OPEN, which the owner refuses
    unless it rewinds it. A death while CLOSING leads back to CLOSING in the next group,
    or to TAKEN if a survivor has all sums.
    """

    IDLE = "no pass"
    OPEN = "in backward"
    REWOUND = "to be run again"
    CLOSING = "waiting for sums"
    TAKEN = "sums adopted from another rank"
    BROKEN = "failed"


class BucketPass(ABC):
    """Buckets, hooks and the passes over them; a subclass weighs them.

    Args:
        parameters: trainable, each once, as defined.
        names: their names.
        group: the process group.
        options: how gradients are packed and sent.
        reduced: records which gradients are sums.
        weights: of this rank's gradients.

    Attributes:
        parameters: as given.
        weights: of this rank's gradients, set up before :meth:`attach`.
        order: indices of the parameters in the order of reduction.
        backward_passes: passes reduced so far.
        closed_passes: of them, those whose sums this rank has.
        on_lost: forms another group where a rank has died, and continues in it; None:
            there can be no other.
        wait_s: seconds of this step in which nothing but other ranks was waited for.
        has_sums: whether the last pass has published sums.
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
        self._queue = BucketQueue(reduced)
        self._order = GradientOrder(self._names)
        self._hooks = GradientHooks(self.parameters)
        self._deferred: tuple[int, bool] | None = None
        self._lock = threading.RLock()
        self._phase = Phase.IDLE
        self._broken = ""
        self._scale = 0.0
        self._late: LateSums | None = None
        self._next_order: list[int] | None = None
        self.order: list[int] = []
        self.backward_passes = self.closed_passes = 0
        self.on_lost: Callable[[], None] | None = None
        self.wait_s = 0.0
        self.has_sums = False

    @abstractmethod
    def open_pass(self) -> float:
        """A pass begins; returns what this rank's gradients are multiplied by."""

    @abstractmethod
    def close_pass(self) -> float:
        """All sums are here; agrees with all ranks on what they are multiplied by."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In order of reduction."""
        return self._queue.buckets

    @property
    def extra_bytes(self) -> int:
        """Memory of the buckets, beside the gradients of plain training."""
        kept = int(self._options.keeps_strides or self._options.delayed)
        return sum(bucket.extra_bytes(kept) for bucket in self.buckets)

    @property
    def is_delayed(self) -> bool:
        """True if sums come one pass later."""
        return self._late is not None

    def delay(self) -> None:
        """Sums come one pass later, with the next one's end; before :meth:`attach`."""
        self._options = replace(self._options, delayed=True)
        self._late = LateSums(self.parameters)

    def attach(self) -> None:
        """Allocates buckets, together with all ranks, and hooks every parameter."""
        self._build(range(len(self.parameters))[::-1])
        self._hooks.attach(partial(self._on_gradient, weakref.ref(self)))

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        self._hooks.detach()

    def _build(self, order: Sequence[int]) -> None:
        self.order = list(order)
        self._queue.build(self.parameters, self.order, self._group, self._options)

    def drain(self) -> bool:
        """Waits for the sums that are under way, with all ranks, between two steps.

        Returns:
            Whether ``p.grad`` is one now.

        Raises:
            CommunicationError: it failed, or a rank did not arrive in time.
        """
        if self._late is None or not self._late.are_owed:
            return False
        try:
            self.wait_s += self._late.publish(self._queue)
        except CommunicationError as error:
            self._fail(error)
            raise
        return True

    def run_without_backward(self) -> None:
        """A whole pass with the gradients that are there."""
        self._open()
        self._close()

    def rewind(self) -> None:
        """Resets an aborted backward pass, which will produce all gradients again.

        Buckets that were sent stay sent: their gradients were complete.
        """
        if self._phase is Phase.OPEN:
            self._phase = Phase.REWOUND
        self._deferred = None
        self._order.begin()
        self._queue.expect()

    @staticmethod
    def _on_gradient(of: weakref.ref[BucketPass], parameter: torch.Tensor) -> None:
        """Hook of a parameter, which may live longer than its wrapper."""
        self = of()
        index = None if self is None else self._index.get(id(parameter))
        if self is None or index is None:
            return  # what a hook before returned, which torch refuses after all of them
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
        """Backward brings its first gradient; False if hooks of the user's follow it.

        They were registered since the step began. On other parameters they run first.
        """
        if self._phase is not Phase.REWOUND:
            self._open()
        self._phase = Phase.OPEN
        at_backward_end(self._on_end)
        return self._hooks.keep_last(index)

    def _take(self, index: int, is_undefined: bool) -> None:
        """Counts a gradient; its bucket is sent when none is pending.

        Raises:
            ConfigError: it cannot be reduced.
        """
        gradient = self.parameters[index].grad
        if gradient is not None or not is_undefined:
            refuse_gradient(gradient, self._names[index], self._dtypes[index])
        order, queue = self._order, self._queue
        bucket, place = queue.places[index]
        order.came[index] = order.came.get(index, 0) + 1
        if not order.is_agreed:
            order.last.pop(index, None)  # of several gradients the last one counts
            order.last[index] = None
        if place not in bucket.pending:
            if queue.has_sent(bucket):
                order.late.add(index)
        elif index not in order.several:
            bucket.pending.discard(place)
        has_work = not bucket.pending or queue.summed < queue.sent
        if has_work and not self._options.delayed:
            queue.advance(self._scale)

    def _open(self) -> None:
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
        """Opens the pass when all ranks have taken the last sums.

        Again in the next group, where ranks die meanwhile.
        """
        while self._phase is not Phase.TAKEN:
            try:
                self._scale = self.open_pass()
                started_s = time.perf_counter()
                if self._late is None or not self._late.are_under_way:
                    self._queue.reclaim()
                self.wait_s += time.perf_counter() - started_s
                return
            except RankLostError:
                if self.on_lost is None:
                    raise
            self.on_lost()

    def _on_end(self) -> None:
        """End of a backward pass."""
        if self._phase is not Phase.OPEN:  # it was rewound
            return
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            self._take(*deferred)
        self._close()

    def _close(self) -> None:
        """Reduces what is left, waits, and publishes the sums."""
        self._phase = Phase.CLOSING
        self.has_sums = True
        try:
            if self._late is not None and self._order.is_agreed:
                factor = self.close_pass()
                self.has_sums = self._late.are_owed
                self.wait_s += self._late.follow(factor, self._queue, self._scale)
            else:
                self._close_now()
        except CommunicationError as error:
            self._fail(error)
            raise
        finally:
            if self._phase is not Phase.BROKEN:
                self._phase = Phase.IDLE
        if self._order.late:
            self._order.refuse_late()

    def _close_now(self) -> None:
        """Sends what is left, waits for all sums, and publishes them.

        Repeats without ranks that die meanwhile, or copies another rank's sums.
        """
        started_s, factor = time.perf_counter(), None
        while self._phase is not Phase.TAKEN:
            try:
                self._queue.send_rest(self._scale)
                self._queue.finish(self._queue.side)
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
        if self._options.codec != "fp32":
            self._queue.settle()
        self._queue.publish(factor)
        if self._next_order is not None:
            self._reorder(self._next_order)
            self._next_order = None
        if self._late is not None:
            self._late.keep_first()
            self.has_sums = False

    def reduce_in(
        self, group: Group, source: int | None, *, lacks: bool, factor: float
    ) -> None:
        """Continues in the group of the survivors; a collective call.

        If ``source`` holds the sums of the last pass, the others copy them. If no rank
        holds all of them, the pass is reduced again from the kept gradients.

        Args:
            group: of the survivors.
            source: place of a rank with the last pass's sums; None: all have them.
            lacks: this rank does not have those sums.
            factor: factor of the sums.
        """
        if source is not None:
            self._queue.take_over(group, source, lacks=lacks)
        if lacks:
            self._queue.publish(factor)
            self.closed_passes += 1
            if self._phase is Phase.CLOSING:
                self._phase = Phase.TAKEN
            if not self._order.is_agreed:
                self._order.learn()
        self._group = group
        if self._order.is_alike(group):  # by now all have the sums of the last pass
            self._build(self.order)
        else:  # some ranks have not come to it
            self._order.is_agreed = False
            self._build(range(len(self.parameters))[::-1])

    def _fail(self, error: CommunicationError) -> None:
        self._phase = Phase.BROKEN
        self._broken = str(error).splitlines()[0]

    def _end_first(self) -> None:
        """Agrees on the order in which gradients appeared, on the first rank with any.

        Buckets that went before all their gradients had come, on any rank, go again:
        everybody has taken the first sum when this has been agreed on.
        """
        self._next_order = None
        late, order = self._order.agree(self._group)
        self._queue.send_again(late, self._scale)
        if order is not None:
            self._order.learn()
            self._next_order = order

    def _reorder(self, order: Sequence[int]) -> None:
        """Rebuilds the buckets, when all ranks have closed the first pass.

        Its sums lie in the old ones, where a rank that lacks them takes them over. If
        a rank dies here, the order is observed anew.
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
