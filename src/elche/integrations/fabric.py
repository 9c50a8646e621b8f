"""Lightning Fabric on mismatched devices: the strategy "elche".

::

    import elche.integrations.fabric

    fabric = lightning.Fabric(strategy="elche")
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)  # the one to train on, and no other

started by ``elche run script.py``. The model and its optimizers come first; evaluation
iterates over plain DataLoaders, and `fabric.to_device` moves their batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.fabric.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from elche import session
from elche.errors import ConfigError
from elche.integrations.rank_exchange import RankExchange
from elche.integrations.sync_only import sync_config


class ElcheFabricStrategy(SingleDeviceStrategy):
    """Trains what `Fabric.setup` is given with `elche.setup`.

    Args:
        checkpoint_io: as in other strategies of Fabric.
        precision: likewise.
        weight_of: what a batch weighs; see `elche.setup`.
        samples_per_epoch: of an IterableDataset; see `elche.setup`.
        **options: fields of `elche.RunConfig`; the policy is ``sync``.

    Raises:
        ConfigError: an option is unknown or wrong, or the policy trains windows.
    """

    def __init__(
        self,
        checkpoint_io: Any = None,
        precision: Any = None,
        weight_of: Callable[[Any], Any] | None = None,
        samples_per_epoch: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            device=session.device(), checkpoint_io=checkpoint_io, precision=precision
        )
        self._config = sync_config(options, "Lightning Fabric")
        self._weight_of = weight_of
        self._samples_per_epoch = samples_per_epoch
        self._module: nn.Module | None = None
        self._first_optimizer: Optimizer | None = None
        self._has_loader = False
        self._exchange: RankExchange | None = None
        self.global_rank = self.local_rank = session.rank()
        self.world_size = session.world_size()

    @property
    @override
    def accelerator(self) -> Any:
        """That of this rank's device, whatever devices other ranks have."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        is_cuda = self.root_device.type == "cuda"
        self._accelerator = CUDAAccelerator() if is_cuda else CPUAccelerator()

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._ranks()

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        if self._module is not None:
            raise ConfigError(
                "expected one model in fabric.setup, got another; put all that is "
                "trained into one module"
            )
        self._module = module
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._first_optimizer = self._first_optimizer or optimizer
        return optimizer

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if self._module is None or self._first_optimizer is None:
            raise ConfigError(
                "expected fabric.setup(model, optimizer) before "
                "fabric.setup_dataloaders(loader): elche divides the batches of what "
                "is trained"
            )
        if self._has_loader or not isinstance(dataloader, DataLoader):
            raise ConfigError(
                "expected fabric.setup_dataloaders once, with the one DataLoader to "
                "train on; evaluate on plain DataLoaders, and move their batches by "
                "fabric.to_device(batch)"
            )
        self._has_loader = True
        _, _, loader = session.setup(
            self._module,
            self._first_optimizer,
            dataloader,
            config=self._config,
            weight_of=self._weight_of,
            samples_per_epoch=self._samples_per_epoch,
        )
        return loader

    @override
    def all_reduce(
        self, tensor: Any, group: Any = None, reduce_op: Any = "mean"
    ) -> Any:
        return self._ranks().reduce(tensor, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._ranks().decide(decision, all)

    @override
    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        return self._ranks().gather(tensor, needs_gradient=sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._ranks().barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._ranks().broadcast(obj, src)

    def _ranks(self) -> RankExchange:
        if self._exchange is None:
            self._exchange = RankExchange(self.world_size, self._config.timeout_s)
        return self._exchange


STRATEGY_REGISTRY.register(
    "elche",
    ElcheFabricStrategy,
    description="one model on mismatched devices, at the sum of their speeds",
    override=True,
)
