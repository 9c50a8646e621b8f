"""Parameters of one dtype, and the outer step on their flat values.

θ_k are the common parameters after reduction k, and θ_r are this rank's parameters
after local steps. A rank sends weight × (θ_k − θ_r), its weighted *drift*, followed by
the weight. The mean drift is the sum over the ranks divided by the sum of the weights.
θ̄ = θ_k − mean drift is the mean of the contributions. An outer step along the mean
drift gives θ_{k+1}. Nothing is written before the sum is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from elche.comm.averaging.consensus_distance import ConsensusSums
from elche.comm.averaging.outer import OuterStep
from elche.comm.averaging.parameter_memory import ParameterMemory
from elche.comm.codec.coded_exchange import CodedExchange
from elche.comm.tensors.flat import wire_dtype
from elche.comm.transport.process_group import Group

WHAT = "copying a reduction's result"


@final
class ParameterGroup(ParameterMemory):
    """Parameters of one wire dtype, and their update from θ_k to θ_{k+1}."""

    @staticmethod
    def by_dtype(
        parameters: Sequence[nn.Parameter], *, is_overlapped: bool
    ) -> list[ParameterGroup]:
        """Makes a group per wire dtype, in the order in which dtypes appear."""
        members: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            members.setdefault(wire_dtype(parameter.dtype), []).append(parameter)
        return [
            ParameterGroup(each, dtype, is_overlapped=is_overlapped)
            for dtype, each in members.items()
        ]

    def fill(self, weight: float, *, is_free: bool = True) -> bool:
        """Writes weight × (θ_k − θ_r) to the next overlapped message; zeros for 0.

        Training may continue afterwards. Waits for the copy from an accelerator.

        Args:
            weight: weight of the drift.
            is_free: False if a rank may still read the last message: the drift is kept
                apart until :meth:`refill`.

        Returns:
            True if all of θ_r is finite.
        """
        layout, total = self._layout, 0.0
        message = self._message
        is_kept = weight == 1.0 and self._carried is None
        is_kept &= self.exchange.keeps_contribution
        # A coded exchange does not read a message of weight 0.
        is_kept |= weight == 0.0 and isinstance(self.exchange, CodedExchange)
        is_kept &= is_free and not layout.is_staged
        drift = message if is_kept else self._own
        layout.fetch(drift)
        for index, part in enumerate(drift.parts):
            layout.subtract(index, self._base, drift)
            total += float(part.sum().abs())
            if drift is not message and is_free:
                self._weigh(index, part, weight)
        self._drift = drift
        self._set_weight(weight, is_free=is_free)
        return math.isfinite(total)

    def refill(self, weight: float | None = None, *, is_free: bool = True) -> None:
        """Writes weight × the last drift to the message, if that is free.

        Args:
            weight: weight of the drift; None: that of :meth:`fill`.
            is_free: False to change the weight alone, as in :meth:`fill`.
        """
        weight = self._weight if weight is None else weight
        for index, part in enumerate(self._drift.parts if is_free else ()):
            self._weigh(index, part, weight)
        self._set_weight(weight, is_free=is_free)

    def send(self, weight: float) -> None:
        """Begins the sum of weight × (θ_k − θ_r) for the current parameters."""
        layout = self._layout
        drift = self._drift = self._own
        layout.fetch(drift)
        for index, own in enumerate(drift.parts):
            layout.read(index, drift)
            torch.sub(self._base.parts[index], own, out=own)
            self._weigh(index, own, weight)
        self._set_weight(weight)
        self.begin()

    def begin(self) -> None:
        """Sends the filled message."""
        self._is_begun = True
        self.exchange.begin(0)

    def replace(self, rule: OuterStep, consensus: ConsensusSums) -> None:
        """Sets the parameters to θ_{k+1}; call after the sum has arrived."""
        scale = self._scale()
        for index in range(len(self._layout.segments)):
            self._step(index, scale, rule, consensus)
            self._layout.write(index, self._base)
        self.exchange.release()
        self._message_counts()
        self._layout.flush(self._base)

    def correct(self, rule: OuterStep, consensus: ConsensusSums) -> None:
        """Adds θ_{k+1} − θ_r to the parameters; call after the sum has arrived.

        This is the drift θ_k − θ_r minus the outer step.
        """
        scale = self._scale()
        added = self._own if self._layout.is_staged else self._apart
        for index, drift in enumerate(self._drift.parts):
            step = self._step(index, scale, rule, consensus)
            torch.sub(drift, step, alpha=rule.lr, out=added.parts[index])
            self._layout.add(index, added)
        self.exchange.release()
        self._message_counts()
        self._layout.flush_sum(added)

    def receive(
        self, group: Group, source: int, rule: OuterStep, *, lacks: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Receives one rank's θ_{k+1} and momentum; collective, in a new group.

        Args:
            group: group of the survivors.
            source: place in it of a rank that holds them.
            rule: outer step that produced them.
            lacks: True if this rank still holds θ_k, which does not change yet.
        """
        base = self._base_memory if not lacks else torch.empty_like(self._base_memory)
        group.broadcast(base, WHAT, source)
        if rule.kind == "average":
            return base, None
        momentum = None if lacks else self._outer.momentum
        if momentum is None:
            dtype = self._outer.dtype_at(rule.momentum)
            momentum = torch.empty_like(base, dtype=dtype)
        group.broadcast(momentum.view(torch.uint8), WHAT, source)
        return base, momentum

    def adopt_result(
        self, base: torch.Tensor, momentum: torch.Tensor | None, *, keeps: bool
    ) -> None:
        """Adopts a received result, like :meth:`correct` or :meth:`replace`.

        Args:
            base: another rank's θ_{k+1}.
            momentum: that rank's outer momentum; None for ``average``.
            keeps: True to keep this rank's steps since its part of the window ended.
        """
        if isinstance(self.exchange, CodedExchange):
            self.exchange.commit()  # the received result includes this rank's part
        if momentum is not None:
            self._outer.load_momentum(momentum)
        added = self._own if self._layout.is_staged else self._apart
        for index, part in enumerate(self._layout.over(base).parts):
            if keeps:
                torch.add(self._drift.parts[index], part, out=added.parts[index])
                added.parts[index].sub_(self._base.parts[index])
                self._layout.add(index, added)
            self._base.parts[index].copy_(part)
            if not keeps:
                self._layout.write(index, self._base)
        self._message_counts()
        if keeps:
            self._layout.flush_sum(added)
        else:
            self._layout.flush(self._base)

    def _scale(self) -> float:
        """Returns the factor from sum to mean: one over the sum of weights."""
        total = torch.zeros(1, dtype=self._layout.dtype, device="cpu")
        numel = self._layout.numel
        self.exchange.sum_into(numel, numel + 1, total)
        weights = float(total[0].real)
        return 1.0 / weights if weights > 0.0 else 1.0

    def _step(
        self, index: int, scale: float, rule: OuterStep, consensus: ConsensusSums
    ) -> torch.Tensor:
        """Updates θ_k to θ_{k+1} in one segment; returns the step's direction.

        Data outside of the core's cache is read once.
        """
        segment = self._layout.segments[index]
        mean_drift = self._mean.parts[index]
        self.exchange.sum_into(segment.start, segment.stop, mean_drift)
        if scale != 1.0:
            mean_drift.mul_(scale)
        apart = self._apart_from(index, mean_drift)
        consensus.distance += float(torch.vdot(apart, apart).real)
        self._outer.step(segment.start, mean_drift, rule)
        base = self._base.parts[index]
        consensus.size += float(torch.vdot(base, base).real)
        return mean_drift

    def _apart_from(self, index: int, mean_drift: torch.Tensor) -> torch.Tensor:
        """Returns ±(θ_r − θ̄), this rank's drift minus the mean drift."""
        apart = self._apart.parts[index]
        if self._is_overlapped or self._layout.is_staged:
            return torch.sub(self._drift.parts[index], mean_drift, out=apart)
        is_sent = self.exchange.keeps_contribution and self._carried is None
        if self._weight != 0.0 and is_sent:
            sent = self._message.parts[index]
            return torch.add(mean_drift, sent, alpha=-1.0 / self._weight, out=apart)
        self._layout.read(index, self._apart)
        apart.neg_().add_(self._base.parts[index])
        return apart.sub_(mean_drift)

    def _set_weight(self, weight: float, *, is_free: bool = True) -> None:
        self._weight = weight
        if is_free:
            self._message.flat[-1] = weight

    def _weigh(self, index: int, drift: torch.Tensor, weight: float) -> None:
        """Writes weight × (drift + residual) to the message."""
        message = self._message.parts[index]
        if weight == 0.0:  # and not 0 times a drift that may be NaN
            message.zero_()
            return
        torch.mul(drift, weight, out=message)
        if self._carried is not None:
            segment = self._layout.segments[index]
            carried = self._carried[segment.start : segment.stop]
            message.add_(carried, alpha=weight)
