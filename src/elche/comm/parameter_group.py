"""Parameters of one dtype and what averaging holds of them.

θ_k are the parameters that all ranks hold after reduction k, θ_r what this rank made of
them. A rank sends weight × (θ_k − θ_r), its weighted *drift*, and after it the weight.
The sum over the ranks divided by the sum of the weights is the mean drift, and θ̄ =
θ_k − mean drift is the mean of what they contributed. An outer step takes the mean
drift to θ_{k+1}. Nothing is written before the sum is complete.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elche.comm.averager_state import dtype_name
from elche.comm.codec_opening import open_coded_exchange
from elche.comm.driven_exchange import DrivenExchange
from elche.comm.exchange import Exchange
from elche.comm.flat import FlatImage, FlatLayout, shaped, wire_dtype
from elche.comm.outer import OuterOptimizer, OuterStep
from elche.comm.prepared_step import PreparedStep, scale_of
from elche.comm.process_group import Group
from elche.comm.residual_exchange import ResidualExchange

_log = logging.getLogger(__name__)


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
        is_overlapped: keep the drift, so that training can go on meanwhile.
        codec: how the message travels; see :func:`open_coded_exchange`.
    """

    _drift: FlatImage

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        *,
        is_overlapped: bool,
        codec: str = "fp32",
    ) -> None:
        self._codec = codec
        self._layout = FlatLayout(parameters, dtype)
        self._is_overlapped = is_overlapped
        self._base_memory = self._layout.image().flat
        self._outer = OuterOptimizer(self._base_memory)
        self._exchange: Exchange | None = None
        self._prepared: PreparedStep | None = None
        self._weight = 0.0
        self._side = self._messages_sent = 0
        self._lay_out()

    @staticmethod
    def by_dtype(
        parameters: Sequence[nn.Parameter], *, is_overlapped: bool, codec: str = "fp32"
    ) -> list[ParameterGroup]:
        """A group per wire dtype, in the order in which dtypes appear."""
        members: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            members.setdefault(wire_dtype(parameter.dtype), []).append(parameter)
        return [
            ParameterGroup(each, dtype, is_overlapped=is_overlapped, codec=codec)
            for dtype, each in members.items()
        ]

    @property
    def host_bytes(self) -> int:
        """Host memory: θ_k, messages, outer momentum, a kept drift, pieces, a codec."""
        coded = self._exchange if isinstance(self._exchange, ResidualExchange) else None
        extra = coded.extra_bytes if coded is not None else 0
        copies = 3 + self._layout.is_staged
        if self._is_overlapped:
            copies = 5  # two messages: others may still be reading the last one
        pieces = 2 if self._is_overlapped or self._layout.is_staged else 3
        numel = copies * self._layout.numel + pieces * self._mean.flat.numel()
        return numel * self._base_memory.element_size() + extra

    @property
    def exchange(self) -> Exchange:
        """The message that is summed over the ranks."""
        assert self._exchange is not None
        return self._exchange

    def connect(self, group: Group) -> None:
        """Opens the message, with all ranks of the group; what was filled in stays."""
        layout, last = self._layout, self._exchange
        self._settle()
        if isinstance(last, ResidualExchange):
            last.retire()  # nothing is made of its sum any more, in what is written now
        self._prepared = None
        if self._drift is not self._own:
            for own, drift in zip(self._own.parts, self._drift.parts, strict=True):
                own.copy_(drift)
            self._drift = self._own
        numel = layout.numel + 1  # the weight comes last
        sides = 2 if self._is_overlapped else 1
        self._exchange = made = open_coded_exchange(
            group, numel, layout.dtype, self._codec, sides
        )
        if isinstance(last, ResidualExchange) and isinstance(made, ResidualExchange):
            made.load_state_dict(last.state_dict())
        self._side = self._messages_sent = 0
        self._lay_messages()

    def retire(self) -> None:
        """Another one takes its place in the same group; nothing is under way.

        Raises:
            CommunicationError: something had not left, and will not.
        """
        if isinstance(self._exchange, ResidualExchange):
            self._exchange.flush("averaging other parameters")
            self._exchange.retire()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters."""
        return self._layout.tensors

    @torch.no_grad()
    def restore(self) -> None:
        """The parameters become θ_k again: what they have drifted since is lost."""
        self._settle()
        for index in range(len(self._layout.segments)):
            self._layout.write(index, self._base)
        self._layout.flush(self._base)

    @property
    def is_finite(self) -> bool:
        """Whether all parameters are numbers; waits for them."""
        return all(bool(t.isfinite().all()) for t in self._layout.tensors)

    @property
    def squared_norm(self) -> float:
        """Σ θ_k²."""
        self._settle()
        parts = self._base.parts
        return sum(float(torch.vdot(part, part).real) for part in parts)

    def rebase(self) -> None:
        """Takes the parameters' present values as θ_k."""
        self._settle()
        layout = self._layout
        if not layout.fits(layout.tensors):
            self._layout = FlatLayout(layout.tensors, layout.dtype)
            self._lay_out()
            self._lay_messages()
        self._layout.fetch(self._base)
        self._layout.settle()
        for index in range(len(self._layout.segments)):
            self._layout.read(index, self._base)

    def changed(self) -> nn.Parameter | None:
        """A parameter with another shape, dtype, device or strides than before."""
        index = self._layout.changed()
        if index is None:
            return None
        changed = self._layout.tensors[index]
        assert isinstance(changed, nn.Parameter)
        return changed

    def becomes_another(self) -> bool:
        """Whether that makes messages of another dtype or length of the parameters."""
        tensors, dtype = self._layout.tensors, self._layout.dtype
        numel = sum(tensor.numel() for tensor in tensors)
        kinds = {wire_dtype(tensor.dtype) for tensor in tensors}
        return numel != self._layout.numel or bool(kinds - {dtype})

    @property
    def layout(self) -> tuple[str, int]:
        """Dtype and elements of what is averaged."""
        return dtype_name(self._layout.dtype), self._layout.numel

    def is_common(self, base: torch.Tensor | None) -> bool:
        """Whether the parameters are these, in their own precision; waits for them.

        Args:
            base: common parameters, flat; None if the present ones count as that.
        """
        if base is None:
            return True
        tensors = self._layout.tensors
        views = shaped(base, tensors)
        return all(
            _same(tensor.detach().cpu(), view.to(tensor.dtype))
            for tensor, view in zip(tensors, views, strict=True)
        )

    @property
    def has_moved(self) -> bool:
        """Whether the parameters are no longer θ_k; waits for them."""
        self._settle()
        return not self.is_common(self._base_memory)

    def state_dict(self) -> dict[str, Any]:
        """Copies of what a committed state needs; see :meth:`Averager.state_dict`."""
        self._settle()
        dtype, numel = self.layout
        momentum, exchange = self._outer.momentum, self.exchange
        is_wider = any(t.dtype != self._layout.dtype for t in self._layout.tensors)
        coded = exchange if isinstance(exchange, ResidualExchange) else None
        return {
            "dtype": dtype,
            "numel": numel,
            "momentum": None if momentum is None else momentum.clone(),
            "base": self._base_memory.clone() if is_wider else None,
            "residual": None if coded is None else coded.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After :meth:`rebase`: goes on from a saved state that fits."""
        self._settle()
        self._outer.load_momentum(state["momentum"])
        if state["base"] is not None:
            self._base_memory.copy_(state["base"])
        if state["residual"] is None:
            return
        if isinstance(self.exchange, ResidualExchange):
            self.exchange.load_state_dict(state["residual"])
        else:
            _log.warning(
                "a codec's residual is dropped: parameters travel as they are now, and "
                "what encoding has left out until here stays left out"
            )

    def fill(self, weight: float) -> bool:
        """Overlapped: puts weight × (θ_k − θ_r) into the next message; 0 puts zeros.

        Training may go on afterwards. Waits for the copy from a CUDA device.

        Returns:
            Whether all of θ_r is finite.
        """
        self._settle()
        layout, total = self._layout, 0.0
        self._side = self._messages_sent % self.exchange.sides
        message = self._messages[self._side]
        is_kept = weight == 1.0 and self.exchange.keeps_contribution
        drift = message if is_kept and not layout.is_staged else self._own
        layout.fetch(drift)
        layout.settle()
        for index, part in enumerate(drift.parts):
            layout.subtract(index, self._base, drift)
            total += float(part.sum().abs())
            if drift is not message:
                _weigh(part, weight, message.parts[index])
        self._drift = drift
        self._set_weight(weight)
        return math.isfinite(total)

    def refill(self, weight: float | None = None) -> None:
        """Puts weight × what was filled in last into the message of a new group.

        Args:
            weight: None for the one it was filled in with.
        """
        weight = self._weight if weight is None else weight
        message = self._messages[self._side]
        for part, sent in zip(self._drift.parts, message.parts, strict=True):
            _weigh(part, weight, sent)
        self._set_weight(weight)

    def send(self, weight: float) -> None:
        """Begins the sum of weight × (θ_k − θ_r), of what the parameters hold now."""
        layout = self._layout
        layout.fetch(self._own)
        layout.settle()
        for index, message in enumerate(self._messages[0].parts):
            own = self._own.parts[index]
            layout.read(index, self._own)
            torch.sub(self._base.parts[index], own, out=own)
            _weigh(own, weight, message)
        self._set_weight(weight)
        self.begin()

    def begin(self) -> None:
        """The message is filled: the others may have it."""
        self._prepared = None
        self.exchange.begin(self._side)
        self._messages_sent += 1

    def prepare(self, rule: OuterStep) -> None:
        """The step is known, after :meth:`begin`: what can be is worked out meanwhile.

        That is on the thread that drives the exchange, if there is one, and if there is
        memory: where the drift itself is the message.
        """
        exchange = self.exchange
        if not isinstance(exchange, DrivenExchange) or self._drift is self._own:
            return
        self._prepared = PreparedStep(
            self._layout.segments,
            self._outer,
            rule,
            base=self._base,
            drift=self._drift,
            added=self._own,
            scratch=(self._mean, self._apart),
        )
        exchange.follow_up(self._prepared.work_out)

    def replace(self, rule: OuterStep, spread: Spread) -> None:
        """When the sum is there: the parameters become θ_{k+1}."""
        prepared = self._taken(spread)
        if prepared is not None:
            prepared.take()
        scale = self._scale() if prepared is None else 1.0
        for index in range(len(self._layout.segments)):
            if prepared is None:
                self._step(index, scale, rule, spread)
            self._layout.write(index, self._base)
        self.exchange.release()
        self._layout.flush(self._base)

    def correct(self, rule: OuterStep, spread: Spread) -> None:
        """When the sum is there: adds θ_{k+1} − θ_r to what the parameters hold now.

        That is θ_r's drift from θ_k less the outer step.
        """
        prepared = self._taken(spread)
        if prepared is not None:
            for index in range(len(self._layout.segments)):
                self._layout.add(index, self._own)
            assert isinstance(self.exchange, DrivenExchange)
            self.exchange.put_off(prepared.take)
            self.exchange.release()
            return
        scale = self._scale()
        added = self._own if self._layout.is_staged else self._apart
        for index, drift in enumerate(self._drift.parts):
            step = self._step(index, scale, rule, spread)
            torch.sub(drift, step, alpha=rule.lr, out=added.parts[index])
            self._layout.add(index, added)
        self.exchange.release()
        self._layout.flush_sum(added)

    def _scale(self) -> float:
        """What the sum is multiplied by for the mean: one over the weights' sum."""
        total = torch.zeros(1, dtype=self._layout.dtype, device="cpu")
        numel = self._layout.numel
        self.exchange.sum_into(numel, numel + 1, total)
        return scale_of(float(total[0].real))

    def _taken(self, spread: Spread) -> PreparedStep | None:
        """The step that was worked out meanwhile, if there is one."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            spread.distance += prepared.distance
            spread.size += prepared.size
        return prepared

    def _settle(self) -> None:
        """θ_k and the outer momentum are those of the last step that was taken."""
        if isinstance(self._exchange, DrivenExchange):
            self._exchange.settle()

    def _step(
        self, index: int, scale: float, rule: OuterStep, spread: Spread
    ) -> torch.Tensor:
        """Takes θ_k to θ_{k+1} in one segment; returns the step's direction.

        What of it is not in the core's cache is read once.
        """
        segment = self._layout.segments[index]
        mean_drift = self._mean.parts[index]
        self.exchange.sum_into(segment.start, segment.stop, mean_drift)
        if scale != 1.0:
            mean_drift.mul_(scale)
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
            return torch.sub(self._drift.parts[index], mean_drift, out=apart)
        if self._weight != 0.0 and self.exchange.keeps_contribution:
            sent = self._messages[0].parts[index]
            return torch.add(mean_drift, sent, alpha=-1.0 / self._weight, out=apart)
        self._layout.read(index, self._apart)
        apart.neg_().add_(self._base.parts[index])
        return apart.sub_(mean_drift)

    def _set_weight(self, weight: float) -> None:
        self._weight = weight
        self._messages[self._side].flat[-1] = weight

    def _lay_out(self) -> None:
        layout = self._layout
        self._base = layout.over(self._base_memory)
        self._own = layout.image() if self._is_overlapped else layout.workspace()
        self._drift = self._own
        self._mean = layout.scratch()
        self._apart = layout.scratch()

    def _lay_messages(self) -> None:
        exchange = self.exchange
        self._messages = [
            self._layout.over(exchange.contribution(side))
            for side in range(exchange.sides)
        ]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, in the same places none."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _weigh(drift: torch.Tensor, weight: float, message: torch.Tensor) -> None:
    """Writes weight × drift; nothing at all of a drift that weighs nothing."""
    if weight == 0.0:
        message.zero_()
    else:
        torch.mul(drift, weight, out=message)
