"""Parameters that several ranks hold, such as embedding and head of a language model.

Each rank holds a copy; after the backward pass their gradients are summed in rank order
on the lowest of the ranks and sent back, so all copies take the same optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from elche.comm.transport.messages import Message
from elche.pipeline.peers.peers import StagePeers

_WHAT = "tied parameters"


@dataclass(frozen=True)
class Tie:
    """One parameter on several ranks.

    Attributes:
        ranks: that hold it, ascending; the first sums.
        parameter: this rank's copy, None if it has none.
    """

    ranks: tuple[int, ...]
    parameter: nn.Parameter | None


@final
class TiedParameters:
    """All of them.

    Args:
        ties: on every rank in the same order.
        peers: the ranks.
    """

    def __init__(self, ties: list[Tie], peers: StagePeers) -> None:
        self._ties = ties
        self._peers = peers

    @property
    def copies(self) -> set[int]:
        """Ids of this rank's parameters that a lower rank counts."""
        rank = self._peers.rank
        return {
            id(tie.parameter)
            for tie in self._ties
            if tie.parameter is not None and tie.ranks[0] != rank
        }

    def make_equal(self, timeout_s: float) -> None:
        """Copies the values of the lowest rank to the others."""
        for tie in self._ties:
            if tie.parameter is None:
                continue
            if tie.ranks[0] == self._peers.rank:
                for rank in tie.ranks[1:]:
                    self._send(rank, [tie.parameter.detach()], timeout_s)
            else:
                (value,) = self._receive(tie.ranks[0], timeout_s)
                with torch.no_grad():
                    tie.parameter.copy_(value)

    def sum_gradients(
        self, before: list[torch.Tensor | None], timeout_s: float
    ) -> None:
        """Makes the gradients of a step equal on all ranks.

        Args:
            before: what :meth:`take` returned when the step began.
            timeout_s: deadline.
        """
        for tie, earlier in zip(self._ties, before, strict=True):
            parameter = tie.parameter
            if parameter is None:
                continue
            mine = [] if parameter.grad is None else [parameter.grad]
            if tie.ranks[0] == self._peers.rank:
                parts = list(mine)
                for rank in tie.ranks[1:]:
                    parts += self._receive(rank, timeout_s)
                total = [_sum(parts, parameter)] if parts else []
                for rank in tie.ranks[1:]:
                    self._send(rank, total, timeout_s)
            else:
                self._send(tie.ranks[0], mine, timeout_s)
                total = list(self._receive(tie.ranks[0], timeout_s))
            _restore(parameter, total, earlier)

    def _send(self, rank: int, tensors: list[torch.Tensor], timeout_s: float) -> None:
        self._peers.send(rank, Message(tuple(tensors)), timeout_s, _WHAT)

    def _receive(self, rank: int, timeout_s: float) -> tuple[torch.Tensor, ...]:
        return self._peers.receive(rank, timeout_s, _WHAT).tensors

    def take(self) -> list[torch.Tensor | None]:
        """Puts aside the gradients accumulated before a step; they are summed."""
        found: list[torch.Tensor | None] = []
        for tie in self._ties:
            grad = None if tie.parameter is None else tie.parameter.grad
            found.append(grad)
            if tie.parameter is not None:
                tie.parameter.grad = None
        return found


def _sum(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    total = parts[0].to(like.device, copy=True)
    for part in parts[1:]:
        total += part.to(like.device)
    return total


def _restore(
    parameter: nn.Parameter, total: list[torch.Tensor], earlier: torch.Tensor | None
) -> None:
    if not total:
        parameter.grad = earlier
        return
    made = total[0].to(parameter.device, parameter.dtype)
    parameter.grad = made if earlier is None else earlier.add_(made)
