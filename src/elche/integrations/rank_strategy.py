"""Common parts of the strategies for Lightning's Trainer and for Fabric."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import msgpack
import torch
from torch import distributed as dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from elche.config import RunConfig
from elche.errors import ConfigError
from elche.session import ranks
from elche.session.options import run_config
from elche.session.setup import setup


class RankStrategy(ABC):
    """One rank of a run under `sync`, mixed into a single-device strategy.

    Small values (barriers, decisions, paths, metrics) are exchanged through host memory
    in a gloo group, whatever devices the ranks train on. They are packed by msgpack, so
    that nothing received is unpickled.

    Attributes:
        accelerators: the framework's registry of classes by type of device.
        global_rank: this rank.
        local_rank: this rank, too; frameworks name devices by it.
        world_size: number of ranks of the run.
    """

    accelerators: ClassVar[Any]
    root_device: torch.device

    def take_rank(
        self,
        framework: str,
        options: Mapping[str, Any],
        weight_of: Callable[[Any], Any] | None,
        samples_per_epoch: int | None,
    ) -> None:
        """Joins the run as this process's rank; stores the options of `elche.setup`."""
        self._config = sync_config(options, framework)
        self._given = {"weight_of": weight_of, "samples_per_epoch": samples_per_epoch}
        self._group: Any = None
        self.global_rank = self.local_rank = ranks.rank()
        self.world_size = ranks.world_size()

    def share(self, module: Any, optimizer: Optimizer, loader: DataLoader[Any]) -> Any:
        """Calls `elche.setup`; returns this rank's loader."""
        given: dict[str, Any] = {"config": self._config, **self._given}
        return setup(module, optimizer, loader, **given)[2]

    def setup_environment(self) -> None:
        """Prepares the framework's own state, and the ranks' group."""
        super().setup_environment()  # type: ignore[misc]
        self.meet()

    def meet(self) -> Any:
        """Returns the ranks' gloo group; the first call forms it on all ranks.

        Creates torch's default group if there is none, because torchmetrics reduces in
        it.
        """
        if self._group is None and self.world_size > 1:
            timeout = timedelta(seconds=self._config.timeout_s)
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=timeout)
            self._group = dist.group.WORLD
            if dist.get_backend() != "gloo":
                self._group = dist.new_group(backend="gloo", timeout=timeout)
        return self._group

    @property
    def accelerator(self) -> Any:
        """Accelerator of this rank's device, whatever devices other ranks have."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self._accelerator = self.accelerators.get(self.root_device.type)

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0, which writes files."""
        return self.global_rank == 0

    def barrier(self, name: str | None = None) -> None:
        """Waits until all ranks call it."""
        if self.world_size > 1:
            dist.barrier(self.meet())

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks elementwise: sum, mean, minimum or maximum.

        Args:
            tensor: tensor with equal shapes on all ranks; other values are returned
                unchanged.
            group: not used.
            reduce_op: a name, or torch's ReduceOp.
        """
        if self.world_size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op or "mean").lower().rpartition(".")[2]
        is_mean = name in ("mean", "avg")
        if not (is_mean or name in ("sum", "min", "max")):
            raise ConfigError(
                f"expected to reduce by mean, sum, min or max, got {reduce_op!r}"
            )
        total = tensor.detach().cpu().clone()
        by = getattr(dist.ReduceOp, "SUM" if is_mean else name.upper())
        dist.all_reduce(total, by, self.meet())
        return (total / self.world_size if is_mean else total).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduces a flag over ranks: True if it is set on all, or on any."""
        count = int(self.reduce(torch.tensor(int(decision), device="cpu"), None, "sum"))
        return count == self.world_size if all else count > 0

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gathers the tensors of all ranks, stacked in rank order, without gradient.

        Raises:
            ConfigError: a gradient is requested, or ranks have tensors of different
                shapes or dtypes.
        """
        if self.world_size == 1:
            return tensor
        if sync_grads:
            raise ConfigError(
                "all_gather(sync_grads=True) stacks equal tensors, and ranks train "
                "shares of different sizes; use elche.all_gather(), which gathers "
                "rows, with gradient"
            )
        host = tensor.detach().cpu().contiguous()
        form = str(host.dtype), list(host.shape)
        forms = [self.broadcast(form, rank) for rank in range(self.world_size)]
        if any(each != forms[0] for each in forms):
            raise ConfigError(
                "all_gather stacks equal tensors, and the ranks' are "
                f"{[shape for _, shape in forms]}: ranks train shares of different "
                "sizes; use elche.all_gather()"
            )
        parts = [torch.empty_like(host) for _ in range(self.world_size)]
        dist.all_gather(parts, host, self.meet())
        return torch.stack(parts).to(tensor.device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcasts one rank's plain Python value to all ranks.

        Raises:
            ConfigError: the value is not plain Python.
        """
        if self.world_size == 1:
            return obj
        group, packed = self.meet(), torch.empty(0, dtype=torch.uint8, device="cpu")
        if dist.get_rank() == src:
            try:
                raw = bytearray(msgpack.packb(obj))
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(
                    "only None, numbers, strings, bytes, lists and dicts are "
                    f"broadcast, got {type(obj).__name__}: {error}; a tensor goes "
                    "through elche.all_gather()"
                ) from error
            packed = torch.frombuffer(raw, dtype=torch.uint8)
        size = torch.tensor([packed.numel()], device="cpu")
        dist.broadcast(size, src, group)
        if dist.get_rank() != src:
            packed = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.broadcast(packed, src, group)
        return msgpack.unpackb(packed.numpy().tobytes(), strict_map_key=False)


def sync_config(options: Mapping[str, Any], framework: str) -> RunConfig:
    """Settings of a run for a framework that counts the same steps on every rank.

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
            f"{framework} counts steps on every rank, also on excluded ranks; remove "
            "leave_out=True"
        )
    return config
