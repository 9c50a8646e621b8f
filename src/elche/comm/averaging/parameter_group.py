"""Parameters of one dtype, and the outer step on their flat values.

θ_k are the common parameters after reduction k, and θ_r are this rank's parameters
after local steps. A rank sends weight × (θ_k − θ_r), its weighted *drift*, followed by
the weight. The mean drift is the sum over the ranks divided by the sum of the weights.
θ̄ = θ_k − mean drift is the mean of the contributions. An outer step along the mean
drift gives θ_{k+1}. Nothing is written before the sum is complete.

θ_k and the last snapshot survive a failed reduction and move with the rank to another
group, as does the codec's residual. A group without encoding (e.g. of one rank) adds
the residual to its next message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from elche.comm.averaging.averager_state import dtype_name
from elche.comm.averaging.outer import ConsensusSums, OuterOptimizer, OuterStep
from elche.comm.codec.coded_exchange import CodedExchange, open_coded_exchange
from elche.comm.tensors.flat import (
    FlatImage,
    FlatLayout,
    same_values,
    shaped,
    wire_dtype,
)
from elche.comm.transport.exchange import Exchange
from elche.comm.transport.process_group import Group

WHAT = "copying a reduction's result"
RETIRING = "averaging other parameters"


@final
class ParameterGroup:
    """Parameters of one wire dtype, and their update from θ_k to θ_{k+1}.

    Args:
        parameters: parameters, each once.
        dtype: dtype of the flat memory.
        is_overlapped: True to keep the drift, so that training can continue meanwhile.

    Attributes:
        exchange: exchange of the message that is summed over the ranks.
    """

    exchange: Exchange
    _drift: FlatImage
    _own_image: FlatImage | None
    _message: FlatImage

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
        self._group: Group | None = None
        self._carried: torch.Tensor | None = None
        self._weight = 0.0
        self._is_begun = False
        self._lay_out()

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

    def host_bytes(self, momentum: float | None) -> int:
        """Host memory (bytes): θ_k, messages, momentum, kept drift, scratch, codec."""
        copies = 2 + self._layout.is_staged
        if self._is_overlapped and not self._layout.is_staged:
            copies += (
                self._own_image is not None or not self.exchange.keeps_contribution
            )
        pieces = 2 if self._is_overlapped or self._layout.is_staged else 3
        numel = copies * self._layout.numel + pieces * self._mean.flat.numel()
        numel += 0 if self._carried is None else self._carried.numel()
        held = numel * self._base_memory.element_size() + self.exchange.extra_bytes
        if momentum is None:
            return held
        return held + self._layout.numel * self._outer.dtype_at(momentum).itemsize

    def connect(self, group: Group, codec: str) -> None:
        """Opens the message in a group and keeps the last drift; a collective call."""
        layout = self._layout
        if self._group is not None and self._drift is self._message:
            for own, drift in zip(self._own.parts, self._drift.parts, strict=True):
                own.copy_(drift)
            self._drift = self._own
        numel = layout.numel + 1  # the weight comes last
        residual = self._residual()
        self.exchange = open_coded_exchange(
            group, numel, layout.dtype, codec, is_overlapped=self._is_overlapped
        )
        self._group, self._carried = group, None
        if residual is not None:
            self._load_residual(residual)
        self._is_begun = False
        self._message = layout.over(self.exchange.contribution(0))

    @property
    def is_summed(self) -> bool:
        """True if the sum of a sent message has arrived and is unread."""
        return self._is_begun and self.exchange.has_sum

    def retire(self) -> None:
        """Flushes messages before a successor uses the group; collective, when idle.

        Raises:
            CommunicationError: a rank timed out, or a message could not be sent.
        """
        group = self._group
        if (
            group is None
            or group.has_ended
            or not isinstance(self.exchange, CodedExchange)
        ):
            return
        # Afterwards all ranks have read the last sum, so gloo has nothing to wait for.
        group.all_reduce(torch.zeros(1, device="cpu"), RETIRING)
        self.exchange.flush(RETIRING)

    def rebase(self) -> None:
        """Takes the parameters' current values as θ_k."""
        layout = self._layout
        if not layout.fits(layout.tensors):
            self._layout = FlatLayout(layout.tensors, layout.dtype)
            self._lay_out()
            self._message = self._layout.over(self.exchange.contribution(0))
        self._layout.fetch(self._base)
        for index in range(len(self._layout.segments)):
            self._layout.read(index, self._base)

    def changed(self) -> torch.Tensor | None:
        """Returns a parameter whose shape, dtype, device or contiguity has changed."""
        return self._layout.changed()

    def becomes_another(self) -> bool:
        """True if changed parameters need messages of another dtype or length."""
        tensors, dtype = self._layout.tensors, self._layout.dtype
        numel = sum(tensor.numel() for tensor in tensors)
        kinds = {wire_dtype(tensor.dtype) for tensor in tensors}
        return numel != self._layout.numel or bool(kinds - {dtype})

    @property
    def layout(self) -> tuple[str, int]:
        """Dtype and number of elements of the averaged parameters."""
        return dtype_name(self._layout.dtype), self._layout.numel

    def is_common(self, base: torch.Tensor | None) -> bool:
        """True if the parameters equal `base` in their own precision; synchronizes.

        Args:
            base: flat common parameters; None: the current ones, so always True.
        """
        if base is None:
            return True
        tensors = self._layout.tensors
        views = shaped(base, tensors)
        return all(
            same_values(tensor.detach().cpu(), view.to(tensor.dtype))
            for tensor, view in zip(tensors, views, strict=True)
        )

    @property
    def has_moved(self) -> bool:
        """True if the parameters differ from θ_k; synchronizes the device."""
        return not self.is_common(self._base_memory)

    def common(self) -> dict[int, torch.Tensor]:
        """Returns read-only views of θ_k by parameter ID."""
        tensors = self._layout.tensors
        views = shaped(self._base_memory, tensors)
        return {id(t): view for t, view in zip(tensors, views, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Copies the committed state of the group; see :meth:`Averager.state_dict`."""
        dtype, numel = self.layout
        momentum = self._outer.momentum
        is_wider = any(t.dtype != self._layout.dtype for t in self._layout.tensors)
        return {
            "dtype": dtype,
            "numel": numel,
            "momentum": None if momentum is None else momentum.clone(),
            "base": self._base_memory.clone() if is_wider else None,
            "residual": self._residual(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a saved state that fits; call after :meth:`rebase`."""
        self._outer.load_momentum(state["momentum"])
        if state["base"] is not None:
            self._base_memory.copy_(state["base"])
        if state["residual"] is not None:
            self._load_residual(state["residual"])

    def _residual(self) -> torch.Tensor | None:
        """Returns a copy of this rank's encoding errors; None if there are none."""
        if self._group is not None and isinstance(self.exchange, CodedExchange):
            return self.exchange.residual.clone()
        return None if self._carried is None else self._carried.clone()

    def _load_residual(self, residual: torch.Tensor) -> None:
        """Loads a residual, which is added to the next message."""
        if isinstance(self.exchange, CodedExchange):
            self.exchange.load_residual(residual)
        else:
            self._carried = residual.clone() if bool(residual.any()) else None

    def _message_counts(self) -> None:
        """Marks this rank's last message, residual included, as part of the model."""
        self._is_begun = False
        self._drift = self._apart  # adopted: a new group need not keep it
        if self._weight > 0.0:
            self._carried = None

    @property
    def _own(self) -> FlatImage:
        """Private memory of this rank's drift, allocated at its first use."""
        if self._own_image is None:
            is_whole = self._is_overlapped or self._layout.is_staged
            own = self._layout.image() if is_whole else self._layout.scratch()
            self._own_image = own
        return self._own_image

    def _lay_out(self) -> None:
        layout = self._layout
        self._base = layout.over(self._base_memory)
        self._own_image = None
        self._mean = layout.scratch()
        self._drift = self._apart = layout.scratch()
