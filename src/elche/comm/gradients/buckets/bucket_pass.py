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

How gradients weigh, and what else is agreed in a pass, is the owner's
(:class:`elche.comm.gradients.buckets.bucket_contract.Owner`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from elche.comm.gradients.backward_end import at_backward_end
from elche.comm.gradients.buckets.bucket import Bucket
from elche.comm.gradients.buckets.bucket_contract import Closed, Owner, PassOptions
from elche.comm.gradients.buckets.bucket_queue import BucketQueue
from elche.comm.gradients.buckets.gradient_counts import GradientCounts
from elche.comm.gradients.buckets.gradient_order import GradientOrder
from elche.comm.gradients.buckets.gradient_views import HandedOut
from elche.comm.gradients.buckets.late_sums import LateSums
from elche.comm.gradients.buckets.sum_memory import give_back_freed
from elche.comm.gradients.gradient_hooks import GradientHooks, refuse_gradient
from elche.comm.gradients.graph_capture import refuse_capture
from elche.comm.transport.shared_memory import Members
from elche.errors import CommunicationError, RankLostError


class BucketPass:
    """Buckets, hooks and the passes over them. Made by an owner.

    Args:
        parameters: trainable, each once, as defined.
        names: their names.
        group: the process group.
        options: how gradients are packed, sent and handed out.
        owner: decides when and with what weight; held weakly.

    Attributes:
        order: indices of the parameters in the order of reduction.
        passes: passes so far.
        closed: of them, those whose sums this rank has.
        on_lost: forms another group where a rank has died, and calls
            :meth:`go_on_in`; None: there can be no other.
        wait_s: seconds of waiting for other ranks since the owner set it to 0.
        has_sums: whether the last pass has handed out sums.
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
        self._queue = BucketQueue()
        self._order = GradientOrder(len(self._parameters))
        self._hooks = GradientHooks(self._parameters)
        self._deferred: list[int] = []
        self._lock = threading.RLock()
        self._counts = GradientCounts(self._names)
        self._handed_out = HandedOut(options.reduced, as_views=options.as_views)
        self._broken = ""
        self._scale = 0.0
        self._is_open = False
        self._is_taken = False
        self._awaits_end = False
        self._late = LateSums(self._parameters)
        self._next_order: list[int] | None = None
        self.order: list[int] = []
        self.passes = self.closed = 0
        self.on_lost: Callable[[], None] | None = None
        self.wait_s = 0.0
        self.has_sums = False

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In order of reduction."""
        return self._queue.buckets

    @property
    def is_open(self) -> bool:
        """True if a backward pass is under way, or was broken off."""
        return self._is_open

    @property
    def is_broken(self) -> bool:
        """True if a reduction has failed: there can be no other."""
        return bool(self._broken)

    @property
    def extra_bytes(self) -> int:
        """Memory of the buckets, and of gradients kept for them."""
        kept = int(self._options.as_views or self._options.delayed)
        return self._queue.extra_bytes(kept)

    @property
    def came(self) -> dict[int, int]:
        """Gradients of each parameter in the last pass, in order of the first."""
        return self._counts.came

    def attach(self) -> None:
        """Allocates buckets, together with all ranks, and hooks every parameter."""
        self._build(range(len(self._parameters))[::-1])
        me = weakref.WeakMethod(self._on_gradient)

        def hook(parameter: torch.Tensor) -> None:
            on_gradient = me()
            if on_gradient is not None:
                on_gradient(parameter)

        self._hooks.attach(hook)

    def keep_last(self) -> None:
        """Lets hooks of the user's own run first: what they make of it is reduced."""
        self._hooks.keep_last()

    def detach(self) -> None:
        """Removes every hook; ``p.grad`` stays as it is."""
        self._hooks.detach()

    def _build(self, order: Sequence[int]) -> None:
        self.order = list(order)
        self._queue.build(self._parameters, self.order, self._group, self._options)

    def residuals(self) -> dict[int, torch.Tensor]:
        """Residuals of a codec, flat, by their parameters' ids."""
        return self._queue.residuals()

    def load_residuals(self, left: Mapping[int, torch.Tensor]) -> None:
        """Goes on from those of other buckets."""
        self._queue.load_residuals(left)

    def forget_strides(self) -> None:
        """Before :meth:`attach`: ranks lay their parameters out differently."""
        self._options = replace(self._options, as_views=False, keeps_strides=False)
        self._handed_out = HandedOut(self._options.reduced, as_views=False)

    def delay(self) -> None:
        """Before :meth:`attach`: sums are handed out one pass later."""
        self._options = replace(self._options, delayed=True, strategy="synchronous")

    @property
    def _is_late(self) -> bool:
        """True if the next pass to close leaves its sums under way."""
        return self._options.delayed and self._order.is_agreed

    def drain(self) -> bool:
        """Hands out the sums that are under way; whether there were any.

        Raises:
            CommunicationError: it failed, or a rank did not arrive in time.
        """
        if not self._late.are_owed:
            return False
        try:
            self.wait_s += self._late.hand_out(self._queue, self._handed_out)
        except CommunicationError as error:
            self._fail(error)
            raise
        return True

    def await_end(self) -> None:
        """Called in a backward pass: it closes when that one, and all around it, end.

        So one that is nested in it (reentrant checkpointing) closes nothing.
        """
        if not self._awaits_end:
            self._awaits_end = True
            at_backward_end(self._on_end)

    def run_without_backward(self) -> None:
        """A whole pass with the gradients that are there."""
        self._open()
        self._close()

    def is_given(self, parameter: nn.Parameter) -> bool:
        """True if ``p.grad`` is what the last pass handed out."""
        return self._handed_out.is_given(parameter)

    def rewind(self) -> None:
        """A backward pass was broken off, and its gradients will all come again.

        Buckets that were sent stay sent: their gradients were complete.
        """
        self._awaits_end = False
        self._deferred = []
        self._counts.begin_again()
        self._queue.expect()

    def abandon(self) -> bool:
        """Gives up a pass that an error broke off; whether there was one."""
        was_open, self._is_open, self._awaits_end = self._is_open, False, False
        self._deferred = []
        return was_open

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        owner = self._owner()
        if id(parameter) not in self._index:
            return  # what a hook before returned, which torch refuses after all of them
        if owner is None or not owner.takes(parameter):
            return
        with self._lock:  # devices of one module have a thread each
            index = self._index[id(parameter)]
            is_undefined = parameter.grad is None and not self._hooks.was_taken(index)
            is_final = self._hooks.runs_last(index)
            if is_final and not is_undefined:
                refuse_gradient(parameter, self._names[index], self._dtypes[index])
            if not self._is_open:
                self._open()
            if is_undefined:
                self._counts.undefined.add(index)
            self.await_end()
            if not self._order.is_agreed:
                self._order.observe(index)
            if not is_final:  # hooks registered since the step began come after this
                self._deferred.append(index)
                return
            self._count(index)
            if self._options.strategy == "overlapped":
                self._queue.send(self._scale)
                if self._queue.sum_arrived():
                    self._handed_out.let_go()

    def _count(self, index: int) -> None:
        """Takes note of a gradient; the bucket is full when none is pending."""
        bucket, place = self._queue.places[index]
        is_pending = place in bucket.pending
        is_sent = not is_pending and self._queue.has_sent(bucket)
        if self._counts.take(index, is_pending=is_pending, is_sent=is_sent):
            bucket.pending.discard(place)

    def _open(self) -> None:
        refuse_capture()
        if self._broken:
            raise CommunicationError(
                f"an earlier reduction failed ({self._broken}); form a new group with "
                "the ranks that are left"
            )
        self._queue.begin()
        self._counts.begin()
        self._is_open = True
        self.passes += 1
        self._is_taken = False
        try:
            self._enter()
        except CommunicationError as error:
            self._fail(error)
            raise
        self._queue.expect()

    def _enter(self) -> None:
        """Opens the pass at its owner, when all ranks have taken the last sums.

        Again in the next group, where ranks die meanwhile.
        """
        owner = self._owner()
        assert owner is not None
        while not self._is_taken:
            try:
                self._scale = owner.open_pass(self._queue.side)
                started_s = time.perf_counter()
                if not self._late.are_under_way:
                    self._queue.reclaim()
                self.wait_s += time.perf_counter() - started_s
                return
            except RankLostError:
                if self.on_lost is None:
                    raise
            self.on_lost()

    def _on_end(self) -> None:
        """End of a backward pass."""
        self._awaits_end = False
        deferred, self._deferred = self._deferred, []
        if self._is_open:
            for index in deferred:
                parameter = self._parameters[index]
                if parameter.grad is not None or index not in self._counts.undefined:
                    refuse_gradient(parameter, self._names[index], self._dtypes[index])
                self._count(index)
            self._close()

    def _close(self) -> None:
        """Reduces what is left, waits, and hands out."""
        self._is_open = False
        self.has_sums = True
        try:
            if self._is_late:
                self._close_late()
                return
            started_s = time.perf_counter()
            closed = self._reduced()
            self.wait_s += time.perf_counter() - started_s
            if closed is None:
                self._counts.end()
                return
            self.closed += 1
            self._queue.settle()
            self._handed_out.hand_out(self._queue.buckets, closed)
            if self._next_order is not None:
                self._reorder(self._next_order)
                self._next_order = None
            if self._options.delayed:
                self._late.keep_first()
                self.has_sums = False
        except CommunicationError as error:
            self._fail(error)
            raise
        self._counts.end()

    def _reduced(self) -> Closed | None:
        """Sends what is left, and waits; anew without ranks that die meanwhile.

        None: the sums were taken over from another rank, and are handed out.
        """
        owner = self._owner()
        assert owner is not None
        while not self._is_taken:
            try:
                self._queue.send(self._scale, is_end=True)
                self._queue.finish(self._queue.side)
                if not self._order.is_agreed:
                    self._end_first()
                return owner.close_pass(self._queue.side)
            except RankLostError:
                if self.on_lost is None:
                    raise
            self.on_lost()
            self._enter()
        return None

    def go_on_in(
        self,
        group: Members,
        source: int | None,
        *,
        lacks: bool,
        factor: float = 1.0,
    ) -> None:
        """Ranks have died: the others are the group from now on; with all of them.

        A pass that no rank has all sums of is reduced anew, from gradients that were
        kept; one that ``source`` has the sums of is not.

        Args:
            group: of those who live.
            source: place of one that has the last pass's sums; None: all have them.
            lacks: this rank has not got those sums.
            factor: what they are multiplied by.
        """
        if source is not None:
            self._queue.take_over(group, source, lacks=lacks)
        if lacks:
            self._handed_out.hand_out(self.buckets, Closed(factor=factor))
            self._is_taken = True
            self.closed += 1
            if not self._order.is_agreed:
                self._counts.learn()
        self._group = group
        if self._order.is_alike(group):  # by now all have the sums of the last pass
            self._build(self.order)
        else:  # some ranks have not come to it
            self._order.observe_anew()
            self._build(range(len(self._parameters))[::-1])

    def _close_late(self) -> None:
        """Sends this pass's gradients, and hands out the sums of the one before."""
        owner = self._owner()
        assert owner is not None
        closed = owner.close_pass(self._queue.side)
        self.has_sums = self._late.are_owed
        self.wait_s += self._late.follow(
            closed, self._queue, self._scale, self._handed_out
        )
        self._counts.end()

    def _fail(self, error: CommunicationError) -> None:
        self._is_open = False
        self._broken = str(error).splitlines()[0]

    def _end_first(self) -> None:
        """Agrees on the order in which gradients appeared, on the first rank with any.

        Buckets that went before all their gradients had come, on any rank, go again:
        everybody has taken the first sum when this has been agreed on.
        """
        self._next_order = None
        late, order = self._order.agree(self._counts.late, self._group)
        self._queue.send_again(late, self._scale)
        if order is not None:
            self._counts.learn()
            self._next_order = order

    def _reorder(self, order: Sequence[int]) -> None:
        """Makes buckets anew, when all ranks have closed the first pass.

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
