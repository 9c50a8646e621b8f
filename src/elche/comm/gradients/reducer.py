"""Gradients reduced during backward, weighted by samples or by user weights.

Every rank scales its gradient of the *mean* loss over its n_r samples by n_r / N, and
the group sums. This gives the gradient of the mean over the union batch of N samples
for any shares. With user weights (e.g. tokens), the factor is w_r / Σw. This module
decides when to reduce, :mod:`elche.comm.gradients.part_weights` computes the weights,
and :mod:`elche.comm.gradients.buckets.bucket_pass` reduces bucket by bucket, out of
place. Then ``p.grad`` becomes a view of the reduced bucket.

Cost: two gradient copies. One is the sum, which is ``p.grad``; the other is this rank's
contribution (in shared memory) or its own gradients, kept until the next reduction.
Outside of shared memory, if ranks may die, a third copy keeps the unmodified sum for
ranks that lack it; with several hosts, once per host in its shared memory.

A ``p.grad`` kept by reference stays unchanged, as in plain training. If ranks hold
parameters in different memory formats (e.g. channels last on a GPU), the sum is copied
into the existing gradient instead.

torch's own DistributedDataParallel divides by the world size and has no weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from torch import nn
from typing_extensions import override

from elche.comm.averaging.averager_state import packed_residuals, unpacked_residuals
from elche.comm.gradients.buckets.bucket import PassOptions
from elche.comm.gradients.buckets.bucket_pass import BucketPass, Phase
from elche.comm.gradients.buckets.bucket_queue import Reduced
from elche.comm.gradients.gradient_hooks import at_backward_end
from elche.comm.gradients.part_weights import Lost, PartWeights, StepPart
from elche.comm.model_buffers.buffers import BufferAverager
from elche.comm.norm.norm_scope import NormScope
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError

Look = Callable[[Any, dict[int, int]], None]
"""Receives the step's label, and the number of gradients in the pass of each parameter
index. The dictionary is in order of each parameter's first gradient."""


@final
class GradientReducer(BucketPass):
    """Reduces the gradients of one model in every backward of a step.

    Args:
        parameters: trainable parameters, each once, in order of definition.
        group: process group of all ranks.
        bucket_cap_bytes: bucket capacity in bytes of gradients.
        buffers: averager of the model's buffers, run after the gradients, if any.
        norms: scope of SyncBatchNorm layers that receives each batch's weight, if any.
        names: parameter names for errors; None: numbers.
        codec: codec of float32 and half-precision gradients.
        keeps_sums: True if survivors continue after a rank's death.
        reduced: record of the gradients that are sums; None: not recorded.

    Attributes:
        on_backward: callback run once when the next reduced backward pass begins. There
            the device's computation hides the host work; between two steps the device,
            and every other rank, would wait.
        look: observer called in every pass after the last gradient, before ``p.grad``
            is reduced; called without gradients if the rank's weight is 0. Small
            gradients are still present, and one of the last ones.
        lost: maps a step's label and a pass's number to the fraction missing from
            ranks that left the epoch; the sum is rescaled to the mean of the rest.
        pass_steps: checksum of the steps of all passes so far, in order.
        passed: label of the last summed step; None if there is none.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        bucket_cap_bytes: int,
        buffers: BufferAverager | None = None,
        norms: NormScope | None = None,
        names: Sequence[str] | None = None,
        codec: str = "fp32",
        *,
        keeps_sums: bool = False,
        reduced: Reduced | None = None,
    ) -> None:
        options = PassOptions(
            cap_bytes=max(1, bucket_cap_bytes), codec=codec, keeps_sums=keeps_sums
        )
        names = names or [f"parameter {index}" for index in range(len(parameters))]
        weights = PartWeights(list(parameters), group, norms)
        reduced = reduced or Reduced()
        super().__init__(parameters, names, group, options, reduced, weights)
        self._norms = norms
        self._buffers = buffers
        self._current: StepPart | None = None
        self.lost: Callable[[Any, int], Lost] | None = None
        self._keeps_buffers = False
        self.on_backward: Callable[[], None] | None = None
        self.look: Look | None = None
        self._looked_at = 0
        self.passed: Any = None
        self._traced = self.pass_steps = 0

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the residuals of this rank's codec; None without a codec."""
        left = self._queue.residuals()
        return packed_residuals(self.parameters, left) if left else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the codec's residuals, if there is a codec; a collective call.

        Raises:
            MismatchError: a rank's state does not fit its parameters.
        """
        left = unpacked_residuals(self.parameters, state, self._group)
        self._queue.load_residuals(left)

    def begin_step(self, part: StepPart) -> None:
        """Sets the weight of this rank's gradients until :meth:`end_step`.

        Raises:
            CommunicationError: the previous backward pass was aborted.
        """
        if self._phase is not Phase.IDLE:
            self._refuse_broken_backward()
        if not self._is_own:  # which has no order of hooks
            self._hooks.keep_last()
        self._passes_before = self.backward_passes
        self._current = part
        self.weights.weigh(part)
        self.wait_s = self.work_s = 0.0

    def end_step(self) -> None:
        """Backward passes after this are the user's own and not reduced.

        Raises:
            CommunicationError: the step's backward pass was aborted.
        """
        self._current = None
        self.weights.weigh(None)
        self._holds = False
        if self._phase is not Phase.IDLE:
            self._refuse_broken_backward()

    def weigh_forward(self, part: StepPart | None) -> None:
        """Sets the weight of a forward pass; None restores the current step's."""
        self.weights.weigh(self._current if part is None else part)

    def weigh_pass(self, part: StepPart) -> None:
        """Weights the open backward pass as part of an earlier step.

        Call it in the pass, before its first gradient. The pass is reduced even after
        :meth:`end_step`.
        """
        self.weights.weigh(part)
        at_backward_end(self._end_late_pass)

    def _end_late_pass(self) -> None:
        """Restores the weights if the pass had no gradients (`torch.autograd.grad`)."""
        if self._phase is Phase.IDLE:
            self.weights.weigh(self._current)

    @property
    def is_joinable(self) -> bool:
        """True if :meth:`join_pass` needs no forward pass."""
        return self._norms is None

    def join_pass(self, part: StepPart) -> None:
        """Joins other ranks' pass outside of a step, contributing zeros.

        Args:
            part: this rank's part of that step; if it had samples, its current buffers
                are averaged too.

        Raises:
            CommunicationError: the reduction failed, or a rank timed out.
        """
        self.begin_step(StepPart(0.0, part.active_ranks, 0.0, part.label))
        self._keeps_buffers = part.scale > 0.0
        try:
            self.run_without_backward()
        finally:
            self._keeps_buffers = False
            self.end_step()

    @property
    def part_under_way(self) -> StepPart | None:
        """This rank's part of the pass that has begun and has no sums yet, or None."""
        return self.weights.part if self.backward_passes > self.closed_passes else None

    def continue_in(
        self,
        group: Group,
        source: int | None,
        alive: Callable[[StepPart], StepPart],
        *,
        lacks: bool,
    ) -> None:
        """Continues in the group of the survivors; a collective call.

        Args:
            group: group of the survivors.
            source: place of a rank with the last pass's sums; None: all have them.
            alive: maps a part of a step to that part without the dead ranks.
            lacks: True if this rank lacks those sums.

        Raises:
            CommunicationError: the model has SyncBatchNorm layers, or accumulated
                gradients cannot be reduced again.
        """
        if self._norms is not None:
            raise CommunicationError(
                "a rank died, and SyncBatchNorm layers need all ranks: restart the "
                "run from its last checkpoint (--max-restarts)"
            )
        if self._buffers is not None:
            self._buffers.continue_in(group, source, lacks=lacks)
        factor = self.weights.continue_in(group, source)
        if lacks and (part := self.weights.part) is not None:
            self._look_once(part)
            self.passed = part.label
        self.reduce_in(group, source, lacks=lacks, factor=factor)
        self._weigh_alive(alive)

    def _weigh_alive(self, alive: Callable[[StepPart], StepPart]) -> None:
        """Reweights the current step and the open pass's step for the survivors."""
        late = None if self.weights.part is self._current else self.part_under_way
        if self._current is not None:
            self._current = alive(self._current)
        part = self._current if late is None else alive(late)
        ranks = 0.0
        if self.weights.are_of_sums and self.part_under_way is not None:
            self._refuse_accumulated()
            ranks = self.weights.ranks
        self.weights.weigh(part, ranks)

    def _refuse_accumulated(self) -> None:
        """Refuses to repeat a reduction if gradients were added to an earlier sum."""
        if any(map(self._reduced.is_given, self.parameters)):
            raise CommunicationError(
                "a rank died inside a backward pass that accumulates gradients of "
                "summed losses, or that had samples on that rank only: restart the "
                "run from its last checkpoint (--max-restarts)"
            )

    def hold(self, holds: bool) -> None:
        """Starts or stops gradient accumulation within the step.

        Args:
            holds: True to accumulate without reducing; False: the next pass is reduced.
        """
        self._holds = holds

    def _refuse_broken_backward(self) -> NoReturn:
        raise CommunicationError(
            "a backward pass was interrupted by an error that the loop caught; its "
            "reduction cannot be completed, so the run cannot continue"
        )

    @override
    def open_pass(self) -> float:
        """Opens a pass; returns the factor of this rank's gradients."""
        self._reduced.strays.clear()  # their gradients take part in this reduction
        work, self.on_backward = self.on_backward, None
        if work is not None:
            work()
        if self._traced < self.backward_passes:  # not again in another group
            self._traced = self.backward_passes
            part = self.weights.part
            step = getattr(part and part.label, "step", 0)
            self.pass_steps = zlib.crc32(str(step).encode(), self.pass_steps)
        scale, wait_s = self.weights.open_pass(self._queue.side)
        self.wait_s += wait_s
        return scale

    def _look_once(self, part: StepPart) -> None:
        """Calls `look` once per pass, even if the pass is repeated or copied."""
        came, is_new = self._order.came, self._looked_at < self.backward_passes
        has_weight = self._scale != 0.0
        if self.look is not None and is_new and (came or has_weight):
            self._looked_at = self.backward_passes
            self.look(part.label, came if has_weight else {})

    @override
    def close_pass(self) -> float:
        """Averages buffers, if any; returns the factor from sum to mean."""
        part = self.weights.part
        assert part is not None
        self._look_once(part)
        if part.active_ranks == 0:
            self._refuse_accumulated()
        lost = Lost()
        if self.lost is not None:
            lost = self.lost(part.label, self.backward_passes)
        factor = self.weights.close_pass(lost)
        if self._buffers is not None:
            mine = self._keeps_buffers or self.weights.scale != 0.0
            self._buffers.average(part.active_ranks, mine=mine)
        self.passed = part.label
        if part is not self._current or self.weights.are_of_sums:
            self.weights.weigh(self._current)
        return factor
