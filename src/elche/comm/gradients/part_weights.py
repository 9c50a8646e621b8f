"""Weight of a rank's part of a step, for its gradients and in SyncBatchNorm.

If the user weights steps, all ranks agree on a step's total weight. A rank knows only
the weight w_r of its own part (e.g. tokens). It sends its gradients times w_r / R and,
in a small message of the same pass, w_r; the sum is then multiplied by R / Σw. So no
bucket waits for the slowest rank's weight. R is a power of two near the last step's
total: it causes no rounding, so gradients are bit-identical for any R. In the first
step, and for float16, where R could overflow, ranks wait for the total first.

A rank of weight 0 adds nothing to its own ``p.grad`` either, and waits for the total:
if all weights are 0, all ranks keep rank 0's accumulated gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn

from elche.comm.gradients.gradient_factor import GradientFactor
from elche.comm.norm.norm_scope import NormScope
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.process_group import Group

WHAT = "agreeing on what the ranks' batches weigh"


def reference_of(total: float) -> float:
    """Returns the smallest power of two above a total."""
    return math.ldexp(1.0, math.frexp(total)[1])


@final
class StepWeights:
    """User-given weights of one model's steps.

    Attributes:
        wait_s: seconds of the last pass spent waiting for other ranks' weights before
            the first bucket.
    """

    _exchange: Exchange

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self._group = group
        self._own_factor = GradientFactor(parameters)
        self._waits = any(p.dtype is torch.float16 for p in parameters)
        self._weight = self._reference = 0.0
        self._factor = 1.0
        self._total: float | None = None
        self.wait_s = 0.0

    def attach(self) -> None:
        """Opens the message and hooks every parameter; a collective call."""
        self._open()
        self._own_factor.attach()

    def _open(self) -> None:
        numel, cpu = self._group.world_size, torch.device("cpu")
        self._exchange = open_exchange(self._group, numel, torch.float64, cpu, sides=2)

    def detach(self) -> None:
        """Removes every hook."""
        self._own_factor.detach()

    def begin_step(self, weight: float) -> None:
        """Sets the weight of this rank's part of the step until :meth:`end_step`."""
        self._weight = weight
        self._own_factor.value = float(weight > 0.0)

    def end_step(self) -> None:
        """Ends the step; later backward passes are the user's own."""
        self._own_factor.value = 1.0

    def open_pass(self, side: int) -> float:
        """Sends this rank's weight; returns the factor of its gradients."""
        message = self._exchange.contribution(side).zero_()
        message[self._group.rank] = self._weight
        self._exchange.begin(side)
        self._total, self.wait_s = None, 0.0
        if self._weight == 0.0 or self._reference == 0.0 or self._waits:
            started_s = time.perf_counter()
            total = self._agreed()
            self.wait_s = time.perf_counter() - started_s
            if total == 0.0:
                return float(self._group.rank == 0)
            if self._reference == 0.0 or self._waits:
                self._reference = reference_of(total)
        return self._weight / self._reference

    def close_pass(self) -> float:
        """Waits for all weights; returns the factor from sum to mean."""
        total = self._agreed()
        self._factor = 1.0
        if total != 0.0:
            self._factor, self._reference = self._reference / total, reference_of(total)
        return self._factor

    def continue_in(self, group: Group, source: int | None) -> float:
        """Continues in the group of the survivors; a collective call.

        The next pass waits for its total, since some ranks may lack the last one.

        Args:
            group: group of the survivors.
            source: place of a rank with the last sums; None: all have them.

        Returns:
            Factor of those sums on ``source``.
        """
        factor = torch.tensor([self._factor], dtype=torch.float64, device="cpu")
        if source is not None:
            group.broadcast(factor, WHAT, source)
        self._factor = float(factor)  # this rank may be the source of the next group
        self._group, self._reference = group, 0.0
        self._open()
        return self._factor

    def _agreed(self) -> float:
        """Returns the total weight; waits for it if needed."""
        if self._total is None:
            self._total = math.fsum(self._exchange.finish(WHAT).tolist())
        return self._total


class StepPart(NamedTuple):
    """This rank's part of a step, for weighting its gradients.

    Attributes:
        scale: n_r / N; 0 for a rank without samples, which sends zeros.
        active_ranks: number of ranks that have samples in this step.
        weight: the user's weight for this part; None: its samples. Without
            :meth:`PartWeights.weigh_by_user`, it only matters if it is 0.
        label: identifier of the step, passed to observers.
    """

    scale: float
    active_ranks: int
    weight: float | None = None
    label: Any = None


class Lost(NamedTuple):
    """Fraction missing from a pass, because ranks that left the epoch send zeros.

    Attributes:
        samples: missing fraction of the samples.
        ranks: missing fraction of the ranks that have samples.
    """

    samples: float = 0.0
    ranks: float = 0.0


@final
class PartWeights:
    """Weights of this rank's gradients, and the factor on their sum.

    Args:
        parameters: trainable parameters.
        group: process group of all ranks.
        norms: scope of SyncBatchNorm layers that receives each batch's weight, if any.

    Attributes:
        part: part of the step that new gradients belong to; None outside of a step.
        scale: factor of gradients, as far as this rank knows the weights.
        ranks: number of ranks that have samples, if losses are sums.
        are_of_sums: True if losses are sums.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group, norms: NormScope | None
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._norms = norms
        self._by_user: StepWeights | None = None
        self._sums: GradientFactor | None = None
        self.part: StepPart | None = None
        self.scale = 0.0
        self.ranks = 1.0
        self.are_of_sums = False

    def weigh_by_user(self) -> None:
        """Enables the user's weights; call it before :meth:`attach`."""
        self._by_user = StepWeights(self._parameters, self._group)

    def sum_losses(self) -> None:
        """Declares losses as sums, not means; call it before :meth:`attach`.

        The gradient of the sum over the union batch is the sum of the ranks' gradients.
        But in a second backward pass before the optimizer's step, ``p.grad`` already
        holds the first pass's sum on every rank, which must not be summed again. So the
        reduction is a plain mean over the ranks that have samples, and new gradients
        are multiplied by their number before accumulation. A part of weight 0 adds
        nothing, and gradients accumulated before take part in the mean.
        """
        self._sums = GradientFactor(self._parameters)
        self.are_of_sums = True

    def attach(self) -> None:
        """Hooks every parameter if needed; a collective call."""
        for each in (self._by_user, self._sums):
            if each is not None:
                each.attach()

    def detach(self) -> None:
        """Removes every hook."""
        for each in (self._sums, self._by_user):
            if each is not None:
                each.detach()

    def weigh(self, part: StepPart | None, ranks: float = 0.0) -> None:
        """Sets all factors that depend on the step.

        Args:
            part: this rank's part of the step; None: no step is in progress.
            ranks: number of ranks with samples, if losses are sums and earlier
                gradients were multiplied by it; 0: the part's number.
        """
        self.part = part
        if part is None:
            if self._sums is not None:
                self._sums.value = 1.0
            if self._by_user is not None:
                self._by_user.end_step()
            if self._norms is not None:
                self._norms.weigh(None)
            return
        self.scale = part.scale
        if self._sums is not None:
            ranks = self.ranks = ranks or float(max(1, part.active_ranks))
            self._sums.value = 0.0 if part.weight == 0.0 else ranks
            self.scale = float(part.scale > 0) / ranks
        loss_weight = self.scale
        if self._by_user is not None and part.weight is not None:
            loss_weight = part.weight if part.scale > 0.0 else 0.0
            self._by_user.begin_step(loss_weight)
        elif part.weight == 0.0:
            loss_weight = 0.0
        if self._norms is not None:
            self._norms.weigh(loss_weight)

    def open_pass(self, side: int) -> tuple[float, float]:
        """Opens a pass; returns this rank's gradient factor, and seconds waited."""
        if self._by_user is None:
            return self.scale, 0.0
        if self._group.world_size == 1:
            return 1.0, 0.0
        scale = self._by_user.open_pass(side)
        return scale, self._by_user.wait_s

    def close_pass(self, lost: Lost) -> float:
        """Returns the factor from the sum to the mean over the parts not lost."""
        if self._by_user is not None:
            is_alone = self._group.world_size == 1
            return 1.0 if is_alone else self._by_user.close_pass()
        missing = lost.samples if self._sums is None else lost.ranks
        return 1.0 / (1.0 - missing) if missing < 1.0 else 1.0

    def continue_in(self, group: Group, source: int | None) -> float:
        """Continues with the survivors; see :meth:`StepWeights.continue_in`."""
        self._group = group
        return (
            1.0 if self._by_user is None else self._by_user.continue_in(group, source)
        )
