"""Common parts of the strategies for Lightning's Trainer and for Fabric."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from elche.config import RunConfig
from elche.errors import ConfigError
from elche.integrations.rank_exchange import RankExchange
from elche.session import ranks
from elche.session.options import run_config
from elche.session.setup import setup


class RankStrategy(ABC):
    """One rank of a run under `sync`, before a strategy for a single device.

    Attributes:
        accelerators: the framework's class for each type of device.
        global_rank: this rank.
        local_rank: the same; frameworks name devices by it.
        world_size: ranks of the run.
    """

    accelerators: ClassVar[dict[str, Callable[[], Any]]]
    root_device: torch.device

    def take_rank(
        self,
        framework: str,
        options: Mapping[str, Any],
        weight_of: Callable[[Any], Any] | None,
        samples_per_epoch: int | None,
    ) -> None:
        """Takes this process's place in the run, and what `elche.setup` is to get."""
        self._config = sync_config(options, framework)
        self._given = {"weight_of": weight_of, "samples_per_epoch": samples_per_epoch}
        self._exchange: RankExchange | None = None
        self.global_rank = self.local_rank = ranks.rank()
        self.world_size = ranks.world_size()

    def share(self, module: Any, optimizer: Optimizer, loader: DataLoader[Any]) -> Any:
        """`elche.setup`; returns this rank's loader."""
        given: dict[str, Any] = {"config": self._config, **self._given}
        return setup(module, optimizer, loader, **given)[2]

    @property
    def accelerator(self) -> Any:
        """Accelerator of this rank's device, whatever devices other ranks have."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        is_cuda = self.root_device.type == "cuda"
        self._accelerator = self.accelerators["cuda" if is_cuda else "cpu"]()

    @property
    def is_global_zero(self) -> bool:
        """True if this is the rank that writes."""
        return self.global_rank == 0

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks say so, or any."""
        return self.ranks().decide(decision, all)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """The tensors of all ranks, stacked."""
        return self.ranks().gather(tensor, needs_gradient=sync_grads)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        self.ranks().barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's value of plain Python, on all ranks."""
        return self.ranks().broadcast(obj, src)

    def ranks(self) -> RankExchange:
        """Exchange between ranks; at the first use all ranks form a group."""
        if self._exchange is None:
            self._exchange = RankExchange(self.world_size, self._config.timeout_s)
        return self._exchange


def sync_config(options: Mapping[str, Any], framework: str) -> RunConfig:
    """The run's settings for a framework whose ranks count the same steps.

    Raises:
        ConfigError: the policy trains windows, or an option is unknown or wrong.
    """
    config = run_config(None, {"leave_out": False, **options})
    if config.policy != "sync":
        raise ConfigError(
            f"{framework} counts steps on every rank, and under policy "
            f"{config.policy!r} ranks run different numbers of batches; choose "
            "policy='sync' (also in ELCHE_POLICY), or use elche.setup in your own loop"
        )
    if config.leave_out:
        raise ConfigError(
            f"{framework} counts steps on every rank, also on ranks that would be left "
            "out; leave leave_out=True out"
        )
    return config
