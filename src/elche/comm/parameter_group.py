"""Parameters of one dtype and what averaging holds of them.

θ_k are the parameters that all ranks hold after reduction k, θ_r what this rank made of
them. A rank sends weight × (θ_k − θ_r), its weighted *drift*; the sum over the ranks is
the mean drift, and θ̄ = θ_k − mean drift is the mean of what they contributed. An outer
step takes the mean drift to θ_{k+1}. Nothing is written before the sum is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from elche.comm.exchange import Exchange, open_exchange
from elche.comm.flat import FlatLayout, wire_dtype
from elche.comm.outer import OuterOptimizer, OuterStep
from elche.comm.process_group import Group


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What a synchronisation found out about this rank.

    Attributes:
        divergence: ‖θ_r − θ̄‖ / ‖θ_{k+1}‖ over the trained parameters; 0.0 if the rank
            contributed nothing, NaN if its parameters or the mean are not finite.
        parameter_norm: ‖θ_{k+1}‖.
    """

    divergence: float
    parameter_norm: float


@dataclass(slots=True)
class Spread:
    """Sums of squares over the parameters.

    Attributes:
        distance: Σ (θ_r − θ̄)².
        size: Σ θ_{k+1}².
    """

    distance: float = 0.0
    size: float = 0.0

    def result(self, weight: float) -> SyncResult:
        """What the sums say of a rank that contributed with this weight."""
        norm = math.sqrt(self.size) if self.size >= 0 else math.nan
        if not math.isfinite(self.distance) or not math.isfinite(norm):
            return SyncResult(math.nan, norm)
        if weight == 0.0 or self.distance == 0.0:
            return SyncResult(0.0, norm)
        if norm == 0.0:
            return SyncResult(math.inf, norm)
        return SyncResult(math.sqrt(self.distance) / norm, norm)


class ParameterGroup:
    """Parameters of one wire dtype: θ_k, the message, and the outer optimizer.

    Args:
        parameters: the parameters, each once.
        dtype: of the flat memory.
        is_overlapped: keep a copy of θ_r, so that training can go on meanwhile.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        *,
        is_overlapped: bool,
    ) -> None:
        self._layout = FlatLayout(parameters, dtype)
        self._is_overlapped = is_overlapped
        self._base_memory = self._layout.image().flat
        self._outer = OuterOptimizer(self._base_memory)
        self._exchange: Exchange | None = None
        self._weight = 0.0
        self._lay_out()

    @staticmethod
    def by_dtype(
        parameters: Sequence[nn.Parameter], *, is_overlapped: bool
    ) -> list[ParameterGroup]:
        """A group per wire dtype, in the order in which dtypes appear."""
        members: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            members.setdefault(wire_dtype(parameter.dtype), []).append(parameter)
        return [
            ParameterGroup(each, dtype, is_overlapped=is_overlapped)
            for dtype, each in members.items()
        ]

    @property
    def host_bytes(self) -> int:
        """Host memory: θ_k, message, outer momentum, and a copy of θ_r if kept."""
        copies = 4 if self._is_overlapped or self._layout.is_staged else 3
        return copies * self._layout.numel * self._base_memory.element_size()

    @property
    def exchange(self) -> Exchange:
        """The message that is summed over the ranks."""
        assert self._exchange is not None
        return self._exchange

    def connect(self, group: Group) -> None:
        """Opens the message, with all ranks of the group."""
        layout = self._layout
        cpu = torch.device("cpu")
        self._exchange = open_exchange(group, layout.numel, layout.dtype, cpu)
        self._message = layout.over(self._exchange.contribution(0))

    def rebase(self) -> None:
        """Takes the parameters' present values as θ_k."""
        layout = self._layout
        if not layout.fits(layout.tensors):
            self._layout = FlatLayout(layout.tensors, layout.dtype)
            self._lay_out()
            self._message = self._layout.over(self.exchange.contribution(0))
        self._layout.fetch(self._base)
        self._layout.settle()
        for index in range(len(self._layout.segments)):
            self._layout.read(index, self._base)

    def take(self) -> bool:
        """Copies θ_r; returns whether all of it is finite.

        From a CUDA device the copy may still be under way: the answer is True, and
        :meth:`send` gives the real one.
        """
        self._layout.fetch(self._own)
        self._own_is_drift = False
        total = 0.0
        if not self._layout.is_staged:
            for index, own in enumerate(self._own.parts):
                self._layout.read(index, self._own)
                total += float(own.sum().abs())
        return math.isfinite(total)

    def send(self, weight: float) -> bool:
        """Begins the sum of weight × (θ_k − θ_r); 0 sends zeros.

        θ_r is what was taken, or, where no copy is kept, what the parameters hold.
        Returns whether what came from a CUDA device is finite.
        """
        layout, total = self._layout, 0.0
        if not self._is_overlapped:
            layout.fetch(self._own)
            self._own_is_drift = False
        layout.settle()
        for index, message in enumerate(self._message.parts):
            own = self._own.parts[index]
            if not self._own_is_drift:
                if not self._is_overlapped:
                    layout.read(index, self._own)
                torch.sub(self._base.parts[index], own, out=own)
            if layout.is_staged:
                total += float(own.sum().abs())
            if weight == 0.0:
                message.zero_()
            else:
                torch.mul(own, weight, out=message)
        self._own_is_drift = True
        self._weight = weight
        self.exchange.begin(0)
        return math.isfinite(total)

    def replace(self, rule: OuterStep, spread: Spread) -> None:
        """When the sum is there: the parameters become θ_{k+1}."""
        for index in range(len(self._layout.segments)):
            self._step(index, rule, spread)
            self._layout.write(index, self._base)
        self.exchange.release()
        self._layout.flush(self._base)

    def correct(self, rule: OuterStep, spread: Spread) -> None:
        """When the sum is there: adds θ_{k+1} − θ_r to what the parameters hold now.

        That is θ_r's drift from θ_k less the outer step.
        """
        for index, own in enumerate(self._own.parts):
            step = self._step(index, rule, spread)
            own.sub_(step, alpha=rule.lr)
            self._layout.add(index, self._own)
        self.exchange.release()
        self._layout.flush_sum(self._own)

    def _step(self, index: int, rule: OuterStep, spread: Spread) -> torch.Tensor:
        """Takes θ_k to θ_{k+1} in one segment; returns the step's direction.

        What of it is not in the core's cache is read once.
        """
        segment = self._layout.segments[index]
        mean_drift = self._mean.parts[index]
        self.exchange.sum_into(segment.start, segment.stop, mean_drift)
        apart = self._apart_from(index, mean_drift)
        spread.distance += float(torch.vdot(apart, apart).real)
        self._outer.step(segment.start, mean_drift, rule)
        base = self._base.parts[index]
        spread.size += float(torch.vdot(base, base).real)
        return mean_drift

    def _apart_from(self, index: int, mean_drift: torch.Tensor) -> torch.Tensor:
        """±(θ_r − θ̄), which is what this rank's drift and the mean one differ by."""
        apart = self._apart.parts[index]
        if self._is_overlapped or self._layout.is_staged:
            return torch.sub(self._own.parts[index], mean_drift, out=apart)
        if self._weight != 0.0 and self.exchange.keeps_contribution:
            sent = self._message.parts[index]
            return torch.add(mean_drift, sent, alpha=-1.0 / self._weight, out=apart)
        self._layout.read(index, self._apart)
        apart.neg_().add_(self._base.parts[index])
        return apart.sub_(mean_drift)

    def _lay_out(self) -> None:
        layout = self._layout
        self._base = layout.over(self._base_memory)
        self._own = layout.image() if self._is_overlapped else layout.workspace()
        self._mean = layout.scratch()
        self._apart = layout.scratch()
        self._own_is_drift = False
