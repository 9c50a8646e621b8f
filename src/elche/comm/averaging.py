"""Parameter averaging at the end of a window.

Each rank sends its weighted drift from the common parameters θ_k, and with it, if
asked, the tensors of its optimizer's state, in one message per dtype. Both travel
through a host buffer that is made once, so CPU and CUDA ranks meet with the same
arithmetic. The sum is out of place: until it has arrived the rank's own parameters and
θ_k are untouched, so a reduction that fails can be redone or replaced by another rank's
result. Cost: two model copies (θ_k and the message), one more for an outer momentum,
and one per averaged state tensor.

Float buffers that changed (BatchNorm statistics) are overwritten by their plain mean
over the ranks that trained, never through a drift; counters by the sum of increments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elche.comm.buffers import BufferWatch
from elche.comm.exchange import Exchange, open_exchange
from elche.comm.outer import OuterOptimizer
from elche.comm.process_group import Group
from elche.coordination.messages import Reduce


@dataclass(slots=True)
class _FlatGroup:
    """Parameters of one dtype: common values, message, and views into both."""

    parameters: list[nn.Parameter]
    base: torch.Tensor
    exchange: Exchange
    base_views: list[torch.Tensor]
    message_views: list[torch.Tensor]
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)


class ParameterAverager:
    """Averages one model, and the state of its optimizer, over the group.

    Args:
        parameters: the trainable parameters, each once.
        model: the model, for its buffers.
        optimizer: the optimizer that steps the parameters locally.
        group: the process group.
        reset_state: forget the optimizer's state at every synchronisation.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group,
        *,
        reset_state: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._model = model
        self._optimizer = optimizer
        self._group = group
        self._reset_state = reset_state
        self._groups: list[_FlatGroup] = []
        self._state_exchanges: dict[torch.dtype, tuple[int, Exchange]] = {}
        self._watch = BufferWatch(model)
        self._counters: dict[int, torch.Tensor] = {}

    @property
    def extra_bytes(self) -> int:
        """Host memory that averaging holds beside the model."""
        held = [flat.base for flat in self._groups for _ in range(3)]
        held += [exchange.result(0) for _, exchange in self._state_exchanges.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @torch.no_grad()
    def build(self) -> None:
        """Takes the present parameters as the common ones."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            by_dtype.setdefault(_wire_dtype(parameter.dtype), []).append(parameter)
        for dtype, parameters in by_dtype.items():
            numel = sum(parameter.numel() for parameter in parameters)
            base = torch.empty(numel, dtype=dtype)
            exchange = open_exchange(self._group, numel, dtype, base.device)
            self._groups.append(
                _FlatGroup(
                    parameters,
                    base,
                    exchange,
                    _views(base, parameters),
                    _views(exchange.contribution(0), parameters),
                )
            )
        self.rebase()

    @torch.no_grad()
    def rebase(self) -> None:
        """Takes the present values as common: ranks are known to be equal now."""
        for flat in self._groups:
            for view, parameter in zip(flat.base_views, flat.parameters, strict=True):
                view.copy_(parameter)
        self._mark_buffers()

    def state_layout(self) -> str:
        """Names what of the optimizer's state can be averaged; "" if it has none yet.

        Ranks average state only when all of them name the same layout.
        """
        names = [
            f"{index}:{key}"
            for index, parameter in enumerate(self._parameters)
            for key in _state_keys(self._optimizer, parameter)
        ]
        if not names:
            return ""
        return hashlib.sha256(",".join(names).encode()).hexdigest()[:16]

    def changed_buffers(self) -> tuple[int, ...]:
        """Indices of buffers that were written since the last synchronisation."""
        return tuple(self._watch.written())

    @torch.no_grad()
    def synchronise(self, plan: Reduce) -> None:
        """Carries out a reduction with all ranks; afterwards all hold the same."""
        weight = plan.weights[plan.rank]
        drifts = [self._mean_drift(flat, weight) for flat in self._groups]
        states = self._state_tensors() if plan.include_state else []
        if states:
            self._average_state(states, weight)
        if plan.buffers:
            self._average_buffers(plan.buffers, plan.weights, plan.rank)
        for flat, drift in zip(self._groups, drifts, strict=True):
            flat.outer.step(
                flat.base,
                drift,
                kind=plan.outer,
                lr=plan.outer_lr,
                momentum=plan.outer_momentum,
            )
            for view, parameter in zip(flat.base_views, flat.parameters, strict=True):
                parameter.copy_(view)
        if self._reset_state:
            self._optimizer.state.clear()
        self._mark_buffers()

    def _mean_drift(self, flat: _FlatGroup, weight: float) -> torch.Tensor:
        message = flat.exchange.contribution(0)
        if weight == 0.0:
            message.zero_()
        else:
            for view, base, parameter in zip(
                flat.message_views, flat.base_views, flat.parameters, strict=True
            ):
                if parameter.device.type == "cpu" and parameter.dtype == view.dtype:
                    torch.sub(base, parameter, out=view)
                else:
                    view.copy_(parameter).neg_().add_(base)
            message.mul_(weight)
        flat.exchange.begin(0)
        return flat.exchange.finish("averaging parameters")

    def _state_tensors(self) -> list[torch.Tensor]:
        return [
            self._optimizer.state[parameter][key]
            for parameter in self._parameters
            for key in _state_keys(self._optimizer, parameter)
        ]

    def _average_state(self, states: list[torch.Tensor], weight: float) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for state in states:
            by_dtype.setdefault(_wire_dtype(state.dtype), []).append(state)
        for dtype, tensors in by_dtype.items():
            numel = sum(tensor.numel() for tensor in tensors)
            exchange = self._state_exchange(numel, dtype)
            message = exchange.contribution(0)
            if weight == 0.0:
                message.zero_()
            else:
                for view, tensor in zip(_views(message, tensors), tensors, strict=True):
                    view.copy_(tensor)
                message.mul_(weight)
            exchange.begin(0)
            mean = exchange.finish("averaging optimizer state")
            for view, tensor in zip(_views(mean, tensors), tensors, strict=True):
                tensor.copy_(view)

    def _state_exchange(self, numel: int, dtype: torch.dtype) -> Exchange:
        made = self._state_exchanges.get(dtype)
        if made is None or made[0] != numel:
            made = numel, open_exchange(self._group, numel, dtype, torch.device("cpu"))
            self._state_exchanges[dtype] = made
        return made[1]

    def _average_buffers(
        self, indices: Sequence[int], weights: Sequence[float], rank: int
    ) -> None:
        """Float buffers by plain mean, counters by the sum of increments."""
        active = sum(weight > 0 for weight in weights)
        mine = weights[rank] > 0
        buffers = list(self._model.buffers())
        for index in indices:
            buffer = buffers[index]
            if buffer.is_floating_point() or buffer.is_complex():
                message = buffer.detach().to("cpu", _wire_dtype(buffer.dtype)).clone()
                message = message.div_(active) if mine else torch.zeros_like(message)
                self._group.all_reduce(message, "averaging buffers")
                buffer.copy_(message)
            elif index in self._counters:
                before = self._counters[index]
                increment = buffer.detach().to("cpu", torch.int64) - before
                self._group.all_reduce(increment, "summing counters")
                buffer.copy_(before + increment)

    def _mark_buffers(self) -> None:
        self._watch.mark()
        self._counters = {
            index: buffer.detach().to("cpu", torch.int64, copy=True)
            for index, buffer in enumerate(self._model.buffers())
            if not (buffer.is_floating_point() or buffer.is_complex())
            and buffer.dtype != torch.bool
        }


def _state_keys(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[str]:
    """Entries of a parameter's state that are shaped like it (moments, momentum)."""
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    return sorted(
        key
        for key, value in state.items()
        if key != "step"
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.shape == parameter.shape
    )


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
