"""Shared state of a model's SyncBatchNorm layers: group and batch weight."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar, final

import torch
from typing_extensions import Self

from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.process_group import Group
from elche.errors import CommunicationError, ConfigError


@final
class NormScope:
    """State that the SyncBatchNorm layers of one model share.

    A copy of a layer shares it (`copy.deepcopy`); a pickled one is in no group.

    Args:
        group: the ranks that normalise together; None for no group.

    Attributes:
        divided_by: the call inside which each rank has batches of its own, if any.
        group: a group of one where none was given.
        loss_weight: weight of this rank's losses, as set by :meth:`weigh`.
    """

    divided_by: ClassVar[str] = ""

    def __init__(self, group: Group | None = None) -> None:
        self.group = group or Group.alone(timeout_s=1.0)
        self.loss_weight: float | None = None
        self._exchanges: dict[int, Exchange] = {}
        self._sides: dict[int, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[NormScope], tuple[()]]:
        return NormScope, ()

    @classmethod
    @contextlib.contextmanager
    def dividing(cls, call: str) -> Iterator[None]:
        """Makes layers refuse to synchronise inside, where ranks have other batches."""
        cls.divided_by = call
        try:
            yield
        finally:
            cls.divided_by = ""

    def weigh(self, loss_weight: float | None) -> None:
        """Sets the loss weight of this rank's next batches, relative to other ranks'.

        Args:
            loss_weight: the factor of this rank's loss in the sum that is minimised,
                up to a factor common to all ranks: n_r / N where each loss is the mean
                over n_r of N samples, 1 on every rank where each is a sum. 0: the batch
                counts nowhere, in no statistic either. None (on all ranks or on none):
                in proportion to the elements that each layer sees.

        Raises:
            ConfigError: the weight is negative or not finite.
        """
        if loss_weight is not None and not (
            math.isfinite(loss_weight) and loss_weight >= 0
        ):
            raise ConfigError(
                f"expected a loss weight of at least 0, or None, got {loss_weight!r}"
            )
        self.loss_weight = loss_weight

    def sum(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """The sum of ``values`` over all ranks.

        Raises:
            CommunicationError: a rank did not arrive in time.
        """
        numel = values.numel()
        exchange = self._exchanges.get(numel)
        if exchange is None:
            try:
                exchange = self._open(numel)
            except CommunicationError as error:
                raise CommunicationError(f"{what}: {error}") from error
            self._exchanges[numel] = exchange
        side = self._sides[numel] = 1 - self._sides.get(numel, 1)
        exchange.contribution(side).copy_(values)
        exchange.begin(side)
        return exchange.finish(what).to("cpu", copy=True)

    def _open(self, numel: int) -> Exchange:
        """Two sides, so that a rank that is ahead never writes what others read.

        On the host, unless the group (NCCL's, say) names a device for small messages.
        """
        group = self.group
        device = getattr(group, "control_device", torch.device("cpu"))
        with torch.inference_mode(False):
            exchange = open_exchange(group, numel, torch.float64, device, sides=2)
            for side in range(exchange.sides):
                exchange.result(side)
        return exchange
