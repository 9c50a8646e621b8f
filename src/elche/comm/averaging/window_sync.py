"""Base of window reductions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from elche.errors import ConfigError, ProtocolError


@dataclass(frozen=True, slots=True)
class SyncResult:
    """Result of a synchronisation on this rank.

    Attributes:
        divergence: ‖θ_r − θ̄‖ / ‖θ_{k+1}‖ over the trained parameters; 0.0 if the rank
            contributed nothing, NaN if its parameters or the mean are not finite.
        parameter_norm: ‖θ_{k+1}‖; None if not measured.
    """

    divergence: float
    parameter_norm: float | None


class WindowSync(ABC):
    """One rank's part in the reductions of its windows."""

    is_overlapped = False
    weighs_gradients = False
    """True if gradients are weighed by the current batch's weight."""
    is_common_step = False
    """True if the window's end is a step of the optimizer, the same on every rank."""
    takes_steps = True
    """True while optimizers may step; on summed gradients, only at the window's end."""
    has_moved = True
    """False if the last window's update is known to be zero: all gradients still wait
    for an optimizer step. It is checked only after a non-finite update."""

    @property
    @abstractmethod
    def extra_bytes(self) -> int:
        """Host memory held beside the model."""

    @abstractmethod
    def rebase(self) -> None:
        """Takes the current model as the common one."""

    @abstractmethod
    def begin_batch(self, weight: float, parts: float = 1.0) -> None:
        """Records the batch that a loop body begins on.

        Args:
            weight: its samples, or its weight by the user's function.
            parts: samples of its global batch over its own.
        """

    @abstractmethod
    def batch_done(self) -> None:
        """Records that the loop body has run."""

    def hold(self, holds: bool) -> None:  # noqa: B027
        """Keeps gradients for a later pass through the batch, while ``holds``."""

    def rewind(self) -> None:  # noqa: B027
        """Discards an interrupted pass; all of its batch will be run again."""

    def refuse_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Refuses the step of an optimizer that could not move anything."""

    @abstractmethod
    def detach(self) -> None:
        """Removes every hook from the parameters."""

    def retire(self) -> None:  # noqa: B027
        """Releases resources for a successor in the same group; nothing is in progress.

        Raises:
            CommunicationError: pending sends cannot complete.
        """

    @abstractmethod
    def changed_buffers(self) -> tuple[int, ...]:
        """Indices of buffers written since the last reduction."""

    def state_dict(self) -> dict[str, Any] | None:
        """State of averaging beside the model; None where nothing is averaged."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores :meth:`state_dict`, with all ranks.

        Raises:
            ConfigError: there is a state, but nothing is averaged here.
        """
        refuse_state(state)

    def common(self) -> dict[int, torch.Tensor]:
        """Common values of parameters and buffers, by their ids.

        Valid after a reduction; empty where the model itself holds them.
        """
        return {}

    @abstractmethod
    def has_sum(self, plan: Reduce) -> bool:
        """True if :meth:`finish` of the last window needs no other rank."""

    @abstractmethod
    def copy_result(
        self, group: Group, source: int, plan: Reduce, *, lacks: bool, keeps: bool
    ) -> None:
        """See `Averager.copy_result`."""

    @abstractmethod
    def reconnect(self, group: Group) -> None:
        """Reduces in a new group from now on, with all its ranks."""

    @abstractmethod
    def close(self, *, begins: bool) -> bool:
        """Ends the window; True if its update is finite, and has a weight.

        ``begins``: an overlapped reduction may begin before its plan arrives.
        """

    def reduce(self, plan: Reduce) -> SyncResult:
        """Runs a planned reduction, waiting for the other ranks."""
        raise ProtocolError(f"window {plan.window} is only reduced overlapped")

    def begin(self, plan: Reduce) -> None:
        """Begins a planned reduction, unless :meth:`close` has begun it."""
        raise ProtocolError(f"window {plan.window} is not reduced overlapped")

    def poll(self) -> bool:
        """True if the overlapped reduction's result has arrived."""
        return False

    @abstractmethod
    def finish(self, plan: Reduce, *, is_drained: bool) -> SyncResult:
        """Completes a reduction that was begun, and adopts its result."""


def refuse_state(state: dict[str, Any] | None) -> None:
    """Refuses a state of averaging where gradients are reduced.

    Raises:
        ConfigError: there is a state.
    """
    if state is not None:
        raise ConfigError(
            "the state is of averaged parameters, and this run reduces gradients; "
            "expected the policy and update that it was saved under"
        )
