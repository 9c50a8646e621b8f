"""Lightning's Trainer on mismatched devices: the strategy "elche".

::

    import elche.integrations.lightning

    trainer = lightning.Trainer(strategy="elche", max_epochs=5)

started by ``elche run script.py``. Each rank runs its own Trainer on its own device.
elche divides every batch of the training loader, and reduces gradients during backward.
Setup is delayed until Lightning has requested the training loader.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch.utils.data import DataLoader
from typing_extensions import Unpack, override

from elche.comm.norm.sync_batch_norm import convert_sync_batchnorm
from elche.errors import ConfigError
from elche.integrations.counted_epochs import CountedEpochs
from elche.integrations.rank_strategy import RankStrategy
from elche.runtime.loader import RunLoader
from elche.session import ranks
from elche.session.options import SetupOptions
from elche.session.process import failing_together, shutdown


class ElcheStrategy(RankStrategy, SingleDeviceStrategy):
    """Trains a LightningModule with `elche.setup`.

    Validation, test and prediction run over their whole loaders on every rank, as on
    one device. ``trainer.save_checkpoint`` writes on rank 0.

    Args:
        checkpoint_io: as in other strategies of Lightning.
        precision_plugin: as in other strategies of Lightning.
        weight_of: weight of a batch; see `elche.setup`.
        samples_per_epoch: epoch length of an IterableDataset; see `elche.setup`.
        **options: fields of `elche.RunConfig`; the policy is ``sync``.

    Raises:
        ConfigError: an option is unknown or wrong, or the policy trains windows.
    """

    strategy_name = "elche"
    accelerators: ClassVar = AcceleratorRegistry

    def __init__(
        self,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        weight_of: Callable[[Any], Any] | None = None,
        samples_per_epoch: int | None = None,
        **options: Unpack[SetupOptions],
    ) -> None:
        super().__init__(
            device=ranks.device(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.take_rank("Lightning's Trainer", options, weight_of, samples_per_epoch)
        self._layer_sync: Any = None  # Lightning's, with Trainer(sync_batchnorm=True)
        self._batches: CountedEpochs | None = None

    @property
    def is_distributed(self) -> bool:
        """True if values logged with ``sync_dist=True`` are reduced."""
        return bool(self.world_size > 1)

    @override
    def setup(self, trainer: Trainer) -> None:
        self._batches, self.optimizers = None, list[Any]()
        # elche divides the training batches, and every rank evaluates on all data.
        trainer._accelerator_connector.use_distributed_sampler = False
        module = self.lightning_module
        if self._layer_sync is not None:
            convert_sync_batchnorm(module)
        super().setup(trainer)
        if not any(isinstance(each, _BatchEnds) for each in trainer.callbacks):
            trainer.callbacks.insert(0, _BatchEnds(self))

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if self._batches is not None:
            raise ConfigError(
                "expected one training DataLoader for the whole of trainer.fit, got "
                "another: return one from train_dataloader(), and leave "
                "reload_dataloaders_every_n_epochs out"
            )
        if not isinstance(dataloader, DataLoader):
            raise ConfigError(
                "expected a torch.utils.data.DataLoader to train on, got "
                f"{type(dataloader).__name__}; elche divides its batches"
            )
        self._batches = CountedEpochs(dataloader, dataloader)
        if self.optimizers:  # else configure_optimizers() has requested the length
            self.share_batches()
        return self._batches

    def share_batches(self) -> None:
        """Runs `elche.setup` on model, optimizer and loader, once."""
        batches, module = self._batches, self.lightning_module
        if batches is None or isinstance(batches.loader, RunLoader):
            return
        if not self.optimizers:
            raise ConfigError("expected an optimizer from configure_optimizers()")
        shared = self.share(module, self.optimizers[0], batches.loader)
        batches.loader = batches.batches = shared

    def leave_epoch(self) -> None:
        """Ends the epoch, or abandons it if batches are left."""
        if self._batches is not None:
            self._batches.leave()

    @override
    def on_exception(self, exception: BaseException) -> None:
        with contextlib.suppress(BaseException), failing_together():
            raise exception

    @override
    def teardown(self) -> None:
        self.leave_epoch()
        self._batches = None
        shutdown()
        super().teardown()


class _BatchEnds(Callback):
    """Ends elche's epoch after the last batch, before Lightning validates."""

    def __init__(self, strategy: ElcheStrategy) -> None:
        self._strategy = strategy

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.share_batches()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if trainer.is_last_batch:
            self._strategy.leave_epoch()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.leave_epoch()


StrategyRegistry.register(
    ElcheStrategy.strategy_name,
    ElcheStrategy,
    description="one model on mismatched devices, at the sum of their speeds",
    override=True,
)
