"""The order of an epoch's samples, drawn on the first living rank.

Its generator states are sent with each epoch, so that after its death the next rank
draws the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from elche.comm.transport.process_group import Group
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.runtime.data.positions import (
    drawn_sampler,
    enumerate_batches,
    share_keys,
)

GENERATORS_ONLY: Final = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
"""Samplers whose only state is that of their generators."""


@final
class SampleOrder:
    """Draws sample orders on one rank, and shares generator states for failover.

    Args:
        loader: the user's DataLoader, the same on all ranks.
        generators: generators that it draws from, in addition to torch's own.
        sends_state: send generator states to the other ranks.

    Attributes:
        keys: keys of the epoch's positions; None if this rank lacks them.
        received: generator states of the first rank; None on that rank itself.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        generators: Sequence[torch.Generator],
        *,
        sends_state: bool,
    ) -> None:
        self._loader = loader
        self._generators = list(dict.fromkeys(generators))
        self._sends_state = sends_state
        self._epoch = -1
        self._most: int | None = None
        self.received: list[bytes] | None = None
        self.keys: torch.Tensor | list[Any] | None = None

    def begin(self, epoch: int, most: int | None) -> None:
        """Begins a new epoch, whose order this rank lacks.

        Args:
            epoch: its number.
            most: limit on the batches drawn; None for all.
        """
        self._epoch, self._most, self.keys = epoch, most, None

    def draw(self) -> BatchSizes:
        """Draws the epoch's order on this rank; returns its batches' sizes."""
        self.keys, sizes = enumerate_batches(self._loader, self._epoch, self._most)
        return sizes

    def share(self, group: Group, source: int = 0) -> None:
        """Sends one rank's keys, and its generator states after them, to all."""
        received = self._share_generators(group, source)
        keys: Any = self.keys if group.rank == source else None
        if isinstance(keys, torch.Tensor):
            keys = keys.tolist()
        self.keys = share_keys(group, keys, source)
        self.received = received

    def settle(self, group: Group, source: int | None) -> None:
        """Shares the order of a begun epoch with ranks that lack it, or draws it again.

        Args:
            group: group of the living ranks.
            source: place of a rank that has the order; None: it was lost with its rank.
        """
        if source is None and group.rank == 0:
            self.restore_received()
            self.draw()
        self.share(group, source or 0)

    def share_generators(self, group: Group) -> None:
        """Broadcasts the state of the first rank's generators."""
        self.received = self._share_generators(group, 0)

    def _share_generators(self, group: Group, source: int) -> list[bytes] | None:
        """Sends the generator states of ``source``; None without failover."""
        if not self._sends_state:
            return None
        states = torch.get_rng_state(), *(g.get_state() for g in self._generators)
        own = self.received or [state.numpy().tobytes() for state in states]
        sent = share_keys(group, list(own) if group.rank == source else None, source)
        received: list[Any] = list(sent)
        is_first = group.rank == source and self.received is None
        return None if is_first else received

    def restore_received(self) -> None:
        """Restores generator states on a rank that has become the first."""
        received, self.received = self.received, None
        if received is None:
            return
        states = [
            torch.frombuffer(bytearray(raw), dtype=torch.uint8) for raw in received
        ]
        torch.set_rng_state(states[0])
        for generator, state in zip(self._generators, states[1:], strict=True):
            generator.set_state(state)


def sampler_with_state(loader: DataLoader[Any]) -> str:
    """Class name of a sampler with state beyond generators; "" without such state."""
    kind = type(drawn_sampler(loader))
    return "" if kind in GENERATORS_ONLY else kind.__name__
