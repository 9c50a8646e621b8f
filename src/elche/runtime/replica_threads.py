"""Forward and backward of several replicas at once, each in a thread of its own."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from elche.errors import ConfigError, DeadlineError
from elche.runtime.replica_checks import check_loss
from elche.runtime.transfer import to_device

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
"""Called with a replica and its part of the batch; the mean loss of that part."""


@dataclass(frozen=True, slots=True)
class Part:
    """A replica's part of a step.

    Attributes:
        replica: computes it.
        batch: its samples.
        loss_fn: their mean loss.
        weight: of that loss in the whole batch's.
    """

    replica: nn.Module
    batch: Any
    loss_fn: LossFunction
    weight: float


@final
class ReplicaThreads:
    """A thread per device, started when first needed.

    Args:
        devices: of the replicas.
        timeout_s: deadline of a step.
    """

    def __init__(self, devices: Sequence[torch.device], timeout_s: float) -> None:
        if not math.isfinite(timeout_s) or timeout_s <= 0:
            raise ConfigError(f"expected a positive timeout_s, got {timeout_s!r}")
        self._devices = tuple(devices)
        self._timeout_s = timeout_s
        self._pool: ThreadPoolExecutor | None = None

    def run(self, parts: Mapping[int, Part]) -> dict[int, torch.Tensor]:
        """Runs the parts; gradients are left in the replicas.

        Args:
            parts: by the index of the device.

        Returns:
            The weighted losses, detached.

        Raises:
            DeadlineError: some did not finish in time; their threads are given up.
        """
        pool, modes = self._started(), _Modes()
        futures = {
            index: pool.submit(_forward_backward, part, self._devices[index], modes)
            for index, part in parts.items()
        }
        wait(futures.values(), timeout=self._timeout_s)
        late = [index for index, future in futures.items() if not future.done()]
        if late:
            self._pool = None
            pool.shutdown(wait=False, cancel_futures=True)
            places = ", ".join(str(self._devices[index]) for index in late)
            raise DeadlineError(
                f"replicas {late} (on {places}) did not finish within "
                f"{self._timeout_s:g} s"
            )
        return {index: future.result() for index, future in futures.items()}

    def close(self) -> None:
        """Ends the threads; the next step would start new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            pool = ThreadPoolExecutor(len(self._devices), thread_name_prefix="replica")
            weakref.finalize(self, pool.shutdown, wait=False)
            self._pool = pool
        return self._pool


class _Modes:
    """Modes of the calling thread that are a thread's own in torch."""

    def __init__(self) -> None:
        self.autocast = {
            kind: (
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
            )
            for kind in ("cpu", "cuda")
        }


def _forward_backward(part: Part, device: torch.device, modes: _Modes) -> torch.Tensor:
    """One replica's part of a step; its weighted loss, detached."""
    enabled, dtype = modes.autocast[device.type]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.enable_grad():
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            loss = part.loss_fn(part.replica, to_device(part.batch, device))
        weighted = check_loss(loss) * part.weight
        weighted.backward()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return weighted.detach()
