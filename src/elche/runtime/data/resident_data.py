"""A data set kept on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from elche.errors import ConfigError
from elche.runtime.own_iteration import own_loader
from elche.torch_internals.held import version

logger = logging.getLogger(__name__)


class ResidentDataset:
    """A TensorDataset's tensors kept on a device, and indexed there by keys.

    Batches are what the loader would give, bit for bit. Tensors that were exchanged or
    changed in place are copied again; changes that torch does not see (through numpy)
    are not.

    Args:
        dataset: a data set that :meth:`of` has accepted.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset
        self._copied: list[tuple[torch.Tensor, int]] = []
        self._on_device: list[torch.Tensor] = []

    @staticmethod
    def of(loader: DataLoader[Any]) -> ResidentDataset | None:
        """The loader's data set, if indexing its tensors is all that loading does.

        That is a TensorDataset of plain CPU tensors (subclasses with a way of their own
        to get samples are not), batched by torch's default, no ``worker_init_fn``.
        """
        dataset = loader.dataset
        if (
            not isinstance(dataset, TensorDataset)
            or type(dataset).__getitem__ is not TensorDataset.__getitem__
            or hasattr(dataset, "__getitems__")
            or loader.batch_sampler is None
            or loader.collate_fn is not default_collate
            or loader.worker_init_fn is not None
            or own_loader(loader) is not None
            or not all(_is_plain(tensor) for tensor in dataset.tensors)
        ):
            return None
        return ResidentDataset(dataset)

    @property
    def total_bytes(self) -> int:
        """Bytes that the tensors take on a device."""
        return sum(tensor.nbytes for tensor in self._dataset.tensors)

    @property
    def is_placed(self) -> bool:
        """Whether the tensors are on a device."""
        return bool(self._on_device)

    def place(self, device: torch.device) -> bool:
        """Copies the tensors to a device.

        Returns:
            Whether there was room; if not, nothing stays there.
        """
        tensors = self._dataset.tensors
        self._on_device = []
        try:
            self._on_device = [t.contiguous().to(device) for t in tensors]
        except torch.cuda.OutOfMemoryError:
            logger.warning("no device memory left to keep the data set there")
            return False
        self._copied = [(tensor, version(tensor)) for tensor in tensors]
        return True

    def batch(self, keys: Sequence[int]) -> list[torch.Tensor]:
        """What the loader gives for these keys, on the device.

        Raises:
            ConfigError: the data set is not placed, or a key is no integer.
            IndexError: a key is out of range.
        """
        if not self._on_device:
            raise ConfigError("the data set is not on a device; call place() first")
        if not keys or any(type(key) is not int for key in keys):
            raise ConfigError(f"expected integers as keys, got {list(keys)[:3]!r}")
        device = self._on_device[0].device
        if not self._is_current() and not self.place(device):
            raise ConfigError(
                "the data set has changed, and does not fit on the device any more"
            )
        length = len(self._dataset)
        for key in (min(keys), max(keys)):
            if not -length <= key < length:
                raise IndexError(
                    f"key {key} is out of range for a data set of {length} samples"
                )
        index = torch.tensor(keys, dtype=torch.int64, device="cpu")
        if device.type == "cuda":
            index = index.pin_memory().to(device, non_blocking=True)
        return [tensor[index] for tensor in self._on_device]

    def _is_current(self) -> bool:
        tensors = self._dataset.tensors
        return len(tensors) == len(self._copied) and all(
            now is then and version(now) == copied
            for now, (then, copied) in zip(tensors, self._copied, strict=True)
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dim() > 0
        and not tensor.requires_grad
        and not tensor.is_inference()
    )
