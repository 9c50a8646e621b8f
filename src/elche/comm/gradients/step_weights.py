"""Agreement of all ranks on the total of the user's weights of a step.

A rank knows the weight of its own part (tokens, say), not the others'. It sends its
gradients times w_r / R and, in a small message of the same pass, w_r; the sum is then
multiplied by R / Σw. So no bucket waits for the slowest rank's weight. R is a power of
two near the last step's total: multiplying by it rounds nothing, and a step's gradients
are the same to the bit whatever R was. In the first step, and for float16, whose range
R could leave, ranks wait for the total first.

A rank of weight 0 adds nothing to its own ``p.grad`` either, and waits for the total:
where all weights are 0, all ranks keep the accumulated gradients of rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from elche.comm.gradients.gradient_factor import GradientFactor
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.process_group import Group

WHAT = "agreeing on what the ranks' batches weigh"


def reference_of(total: float) -> float:
    """The least power of two above a total."""
    return math.ldexp(1.0, math.frexp(total)[1])


@final
class StepWeights:
    """Weights of one model's steps.

    Args:
        parameters: the trainable ones.
        group: the process group.

    Attributes:
        wait_s: seconds of the last pass in which other ranks' weights were waited for
            before anything was sent.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self._group = group
        self._own_factor = GradientFactor(parameters)
        self._waits = any(p.dtype is torch.float16 for p in parameters)
        self._exchange: Exchange | None = None
        self._weight = self._reference = 0.0
        self._factor = 1.0
        self._total: float | None = None
        self.wait_s = 0.0

    def attach(self) -> None:
        """Opens the message, with all ranks, and hooks every parameter."""
        self._open()
        self._own_factor.attach()

    def _open(self) -> None:
        numel, cpu = self._group.world_size, torch.device("cpu")
        self._exchange = open_exchange(self._group, numel, torch.float64, cpu, sides=2)

    def detach(self) -> None:
        """Removes every hook."""
        self._own_factor.detach()

    def begin_step(self, weight: float) -> None:
        """This rank's part of the step weighs so much until :meth:`end_step`."""
        self._weight = weight
        self._own_factor.value = float(weight > 0.0)

    def end_step(self) -> None:
        """Backward passes after this are the user's own."""
        self._own_factor.value = 1.0

    def open_pass(self, side: int) -> float:
        """Sends this rank's weight; returns what its gradients are multiplied by."""
        assert self._exchange is not None
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
        """Factor from the sum to the mean."""
        total = self._agreed()
        self._factor = 1.0
        if total != 0.0:
            self._factor, self._reference = self._reference / total, reference_of(total)
        return self._factor

    def go_on_in(self, group: Group, source: int | None) -> float:
        """Ranks have died: the others are the group from now on; with all of them.

        They wait for the next total, since it may be one that only some have had.

        Args:
            group: of those who live.
            source: place of one that has the last sums; None: all have them.

        Returns:
            What these are multiplied by, as that one has it.
        """
        factor = torch.tensor([self._factor], dtype=torch.float64, device="cpu")
        if source is not None:
            group.broadcast(factor, WHAT, source)
        self._factor = float(factor)  # this rank may be the source of the next group
        self._group, self._reference = group, 0.0
        self._open()
        return self._factor

    def _agreed(self) -> float:
        """The ranks' weights together."""
        if self._total is None:
            assert self._exchange is not None
            self._total = math.fsum(self._exchange.finish(WHAT).tolist())
        return self._total
