"""Collectives on copies in host memory, for devices whose tensors gloo does not take.

gloo takes tensors of the CPU and of CUDA. The copies wait for the device: a collective
that began later would have another place in the ranks' common order.
"""

from __future__ import annotations

from typing import Any, final

import torch

from elche.devices.streams import host_memory


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a device's tensor to the host, behind the work that writes it."""
    return host_memory(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


@final
class HostWork:
    """A collective on a host copy.

    Args:
        work: work of gloo on the copy.
        host: the copy.
        tensor: the device's tensor.
    """

    def __init__(self, work: Any, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self.work = work
        self._host, self._tensor = host, tensor

    def is_completed(self) -> bool:
        """True if the copy's collective has ended."""
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Waits for the copy's collective, in any thread; see :meth:`put_back`."""
        self.work.wait()

    @torch.no_grad()
    def put_back(self) -> None:
        """Copies the result to the device, on the caller's stream."""
        self._tensor.copy_(self._host)
