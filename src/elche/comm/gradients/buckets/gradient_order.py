"""Order and number of the gradients of a pass: observed in the first, then expected.

A parameter usually gets one gradient in a pass. It gets several where it is used in
several segments of reentrant activation checkpointing, each of which accumulates for
itself, and none where a branch was not taken. A bucket that goes before the last one
has come lacks it. The last gradient of a layer that is used again and again comes near
the pass's end, so waiting for that costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, final

import torch

from elche.comm.transport.process_group import Group
from elche.errors import ConfigError


@final
class GradientOrder:
    """Gradients of one pass after the other, by the indices of their parameters.

    In the first pass gradients may come after their bucket has gone, which is then sent
    again; in later ones it waits until the end for parameters that got several.

    Attributes:
        came: gradients of each parameter in this pass, in order of the first.
        late: parameters that got one in this pass after their bucket had gone.
        last: the order of their last gradients in the first pass.
        several: parameters that got several in the first pass.
        is_agreed: all ranks follow one order, which is observed no more.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.last: dict[int, None] = {}
        self.came: dict[int, int] = {}
        self.late: set[int] = set()
        self.several: frozenset[int] = frozenset()
        self.is_agreed = False

    def begin(self) -> None:
        """All gradients of a pass will come."""
        self.came, self.late = {}, set()

    def agree(self, group: Group) -> tuple[list[int], list[int] | None]:
        """Compares what was observed in the first pass; with all ranks.

        Returns:
            Gradients that came too late on any rank, and the order on the first rank
            that has observed one; None: no rank has.
        """
        count = len(self._names)
        rows = torch.zeros(group.world_size + 1, count, dtype=torch.int64, device="cpu")
        if self.last:
            unseen = [at for at in range(count) if at not in self.last]
            rows[group.rank] = torch.tensor([*self.last, *unseen], device="cpu") + 1
        for index in self.late:
            rows[-1, index] = 1
        group.all_reduce(rows, "agreeing on the order of gradients")
        *orders, ranks = rows.tolist()
        order = next(filter(any, orders), None)
        return (
            [index for index, number in enumerate(ranks) if number],
            None if order is None else [index - 1 for index in order],
        )

    def learn(self) -> None:
        """The first pass has ended: what got several gradients may in later ones."""
        self.several = frozenset(i for i, times in self.came.items() if times > 1)
        self.late.clear()

    def settle(self) -> None:
        """All ranks follow one order from now on."""
        self.is_agreed = True
        self.last.clear()

    def is_alike(self, group: Group) -> bool:
        """True if all ranks of a group follow an agreed order, or none does."""
        agreed = torch.tensor([int(self.is_agreed)], device="cpu")
        group.all_reduce(agreed, "comparing the order of gradients")
        return int(agreed) in (0, group.world_size)

    def refuse_late(self) -> NoReturn:
        """Refuses a completed pass whose reduction lacks gradients.

        Raises:
            ConfigError: names a parameter that got one too late.
        """
        index = min(self.late)
        raise ConfigError(
            f"{self._names[index]} got {self.came[index]} gradients in this "
            "backward pass and at most one in the first, the others too late for "
            "the reduction; activation checkpointing needs use_reentrant=False "
            "where a layer is used once in some batches and several times in others"
        )
