"""Memory of averaging for the parameters of one dtype, and its saved state.

θ_k are the common parameters after reduction k. They and the last snapshot survive a
failed reduction and move with the rank to another group, as does the codec's residual.
A group without encoding (e.g. of one rank) adds the residual to its next message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from elche.comm.averaging.averager_state import dtype_name
from elche.comm.averaging.outer import OuterOptimizer
from elche.comm.codec.coded_exchange import CodedExchange, open_coded_exchange
from elche.comm.tensors.flat import FlatImage, FlatLayout, shaped, wire_dtype
from elche.comm.transport.exchange import Exchange
from elche.comm.transport.process_group import Group

RETIRING = "averaging other parameters"


class ParameterMemory:
    """Parameters of one wire dtype: θ_k, the message, and the outer optimizer.

    A subclass defines the synchronisation.

    Args:
        parameters: parameters, each once.
        dtype: dtype of the flat memory.
        is_overlapped: True to keep the drift, so that training can continue meanwhile.
    """

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
        self._exchange: Exchange | None = None
        self._group: Group | None = None
        self._carried: torch.Tensor | None = None
        self._weight = 0.0
        self._is_begun = False
        self._lay_out()

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

    @property
    def exchange(self) -> Exchange:
        """Exchange of the message that is summed over the ranks."""
        assert self._exchange is not None
        return self._exchange

    def connect(self, group: Group, codec: str) -> None:
        """Opens the message in a group and keeps the last drift; a collective call."""
        layout = self._layout
        if self._exchange is not None and self._drift is self._message:
            for own, drift in zip(self._own.parts, self._drift.parts, strict=True):
                own.copy_(drift)
            self._drift = self._own
        numel = layout.numel + 1  # the weight comes last
        residual = self._residual()
        self._exchange = open_coded_exchange(
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
        group, exchange = self._group, self._exchange
        if group is None or group.has_ended or not isinstance(exchange, CodedExchange):
            return
        # Afterwards all ranks have read the last sum, so gloo has nothing to wait for.
        group.all_reduce(torch.zeros(1, device="cpu"), RETIRING)
        exchange.flush(RETIRING)

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
            _same(tensor.detach().cpu(), view.to(tensor.dtype))
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
        if isinstance(self._exchange, CodedExchange):
            return self._exchange.residual.clone()
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


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have equal values; NaN equals NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
