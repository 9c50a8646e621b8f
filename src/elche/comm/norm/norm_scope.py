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
from elche.devices.memory import widest_float
from elche.errors import CommunicationError, ConfigError


@final
class NormScope:
    """State that the SyncBatchNorm layers of one model share.

    A layer's deep copy shares its scope; a pickled layer has no group.

    Args:
        group: group of the ranks that normalise together; None: this rank alone.

    Attributes:
        divided_by: name of the current call in which ranks have separate batches; ""
            outside of such calls.
        group: group of the ranks that normalise together.
        loss_weight: weight of this rank's losses, set by :meth:`weigh`.
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
        """Makes layers refuse to synchronise within a call with separate batches."""
        cls.divided_by = call
        try:
            yield
        finally:
            cls.divided_by = ""

    def weigh(self, loss_weight: float | None) -> None:
        """Sets the loss weight of this rank's next batches, relative to other ranks.

        Args:
            loss_weight: factor of this rank's loss in the minimised sum, up to a factor
                common to all ranks: n_r / N if each loss is the mean over n_r of N
                samples, 1 on every rank if each loss is a sum. 0: the batch is ignored,
                also in the statistics. None (on all ranks or on none): the number of
                elements that each layer sees.

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
        """Returns the sum of ``values`` over all ranks; a collective call.

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
        return exchange.finish(what).to("cpu", torch.float64, copy=True)

    def _open(self, numel: int) -> Exchange:
        """Opens an exchange with two sides, so that fast ranks do not overwrite sums.

        It is on the host, unless the group (e.g. NCCL) has a device for small messages.
        """
        group = self.group
        device = getattr(group, "control_device", torch.device("cpu"))
        with torch.inference_mode(False):
            dtype = widest_float(device)
            exchange = open_exchange(group, numel, dtype, device, sides=2)
            for side in range(exchange.sides):
                exchange.result(side)
        return exchange
