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
from typing import Any, ClassVar

from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
from lightning.fabric.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import Unpack, override

from elche.errors import ConfigError
from elche.integrations.rank_strategy import RankStrategy
from elche.session import ranks
from elche.session.options import SetupOptions


class ElcheFabricStrategy(RankStrategy, SingleDeviceStrategy):
    """Trains the model of `Fabric.setup` with `elche.setup`.

    Args:
        checkpoint_io: as in other strategies of Fabric.
        precision: as in other strategies of Fabric.
        weight_of: weight of a batch; see `elche.setup`.
        samples_per_epoch: epoch length of an IterableDataset; see `elche.setup`.
        **options: fields of `elche.RunConfig`; the policy is ``sync``.

    Raises:
        ConfigError: an option is unknown or wrong, or the policy trains windows.
    """

    accelerators: ClassVar = ACCELERATOR_REGISTRY

    def __init__(
        self,
        checkpoint_io: Any = None,
        precision: Any = None,
        weight_of: Callable[[Any], Any] | None = None,
        samples_per_epoch: int | None = None,
        **options: Unpack[SetupOptions],
    ) -> None:
        super().__init__(
            device=ranks.device(), checkpoint_io=checkpoint_io, precision=precision
        )
        self.take_rank("Lightning Fabric", options, weight_of, samples_per_epoch)
        self._module: nn.Module | None = None
        self._first_optimizer: Optimizer | None = None
        self._has_loader = False

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
        return self.share(self._module, self._first_optimizer, dataloader)

    all_reduce = RankStrategy.reduce


STRATEGY_REGISTRY.register(
    "elche",
    ElcheFabricStrategy,
    description="one model on mismatched devices, at the sum of their speeds",
    override=True,
)
