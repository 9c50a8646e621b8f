"""Order in which gradients appear: observed in one pass, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch

from elche.comm.transport.shared_memory import Members


@final
class GradientOrder:
    """The order of a model's parameters by their gradients.

    Args:
        count: of parameters, which are known by their index.

    Attributes:
        is_agreed: it is the same on all ranks, and observed no more.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: dict[int, None] = {}
        self.is_agreed = False

    def observe(self, index: int) -> None:
        """A gradient has come; of several of a parameter the last one counts."""
        self._seen.pop(index, None)
        self._seen[index] = None

    def agree(
        self, late: Iterable[int], group: Members
    ) -> tuple[list[int], list[int] | None]:
        """Compares what was observed; with all ranks.

        Args:
            late: gradients that came too late on this rank.
            group: the process group.

        Returns:
            Those that came too late on any rank, and the order on the first rank that
            has observed one; None: no rank has.
        """
        rows = torch.zeros(
            group.world_size + 1, self._count, dtype=torch.int64, device="cpu"
        )
        if self._seen:
            unseen = [at for at in range(self._count) if at not in self._seen]
            rows[group.rank] = torch.tensor([*self._seen, *unseen], device="cpu") + 1
        for index in late:
            rows[-1, index] = 1
        group.all_reduce(rows, "agreeing on the order of gradients")
        *orders, ranks = rows.tolist()
        order = next(filter(any, orders), None)
        return (
            [index for index, count in enumerate(ranks) if count],
            None if order is None else [index - 1 for index in order],
        )

    def settle(self) -> None:
        """All ranks follow one order from now on."""
        self.is_agreed = True
        self._seen.clear()

    def is_alike(self, group: Members) -> bool:
        """True if all ranks of a group follow an agreed order, or none does."""
        agreed = torch.tensor([int(self.is_agreed)], device="cpu")
        group.all_reduce(agreed, "comparing the order of gradients")
        return int(agreed) in (0, group.world_size)

    def observe_anew(self) -> None:
        """Some ranks have not agreed yet."""
        self.is_agreed = False
