"""Adapter from a torch process group to elche's `Group`.

The user owns the process group: nothing here closes it. If a collective fails in
shared memory, the error names the missing ranks; gloo's own error names none.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from typing_extensions import override

from elche.comm.transport.device_group import DeviceWork
from elche.comm.transport.process_group import Group, late_error
from elche.devices.backends import control_device
from elche.errors import CommunicationError, ConfigError
from elche.runtime.process.launcher_watch import process_state
from elche.torch_internals.groups import group_timeout_s

DEFAULT_TIMEOUT_S = 1800.0


class TorchGroup(Group):
    """Wraps a ``torch.distributed`` process group.

    Args:
        process_group: process group that this rank is a member of.
        timeout_s: deadline of a collective.

    Attributes:
        torch_group: the wrapped group.
        control_device: device of small messages (the backend requires it).
        is_mixed: True if ranks compute on devices of several types.
        pids: process IDs of the ranks if all are on this host, else empty; a wait in
            shared memory fails when one of them has exited.
    """

    def __init__(self, process_group: Any, timeout_s: float) -> None:
        super().__init__(
            process_group, process_group.rank(), process_group.size(), timeout_s
        )
        self.torch_group = process_group
        self._options, self._device_options = (dist.AllreduceOptions() for _ in "12")
        self._options.timeout = timedelta(seconds=timeout_s)
        # Later than ours: NCCL's watchdog would end the process before our error.
        self._device_options.timeout = timedelta(seconds=2 * timeout_s)
        self.control_device = control_device(process_group)
        self.is_mixed = False
        self.on_failure = _explained
        self.check = self._check
        self.pids: Sequence[int] = ()

    def _check(self) -> None:
        for rank, pid in enumerate(self.pids):
            if process_state(pid) in ("", "Z", "X"):
                raise CommunicationError(f"rank {rank} is gone: its process has ended")

    @override
    def all_reduce_async(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cpu":
            return self.torch_group.allreduce([tensor], self._options)
        # A wait with a timeout, in which gloo is polled, would abort NCCL's group.
        work = self.torch_group.allreduce([tensor], self._device_options)
        return DeviceWork(work, self)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """Sums in place and blocks; host tensors are staged on the control device."""
        on_host = tensor.device.type == "cpu"
        near = tensor.to(self.control_device) if on_host else tensor
        self.wait(self.all_reduce_async(near), what)
        if near is not tensor:
            tensor.copy_(near)

    @override
    def broadcast(self, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        """Broadcasts by an all-reduce in which the other ranks contribute zeros.

        So it uses this group's deadline and device.
        """
        if self.rank != source:
            tensor.zero_()
        self.all_reduce(tensor, what)

    def sibling(self) -> TorchGroup:
        """Forms another group of the same ranks; a collective call.

        Its collectives have their own order, so they may run inside a backward pass
        concurrently with this group's.
        """
        made = dist.new_group(
            dist.get_process_group_ranks(self.torch_group),
            timeout=self._options.timeout,
            backend=dist.get_backend(self.torch_group),
            use_local_synchronization=True,
        )
        sibling = TorchGroup(made, self.timeout_s)
        sibling.shares_host = self.shares_host
        sibling.pids = self.pids
        return sibling

    def close(self) -> None:
        """Does nothing: the user owns the process group."""


def _explained(text: str, missing: Sequence[int]) -> CommunicationError:
    """Returns the error of a failed collective, with its likely causes."""
    error = late_error(text, missing)
    return type(error)(
        f"{error}. A rank has ended, hangs, or skipped this step (a rank without a "
        "batch calls join_step())"
    )


def as_group(process_group: Any, timeout_s: float | None) -> TorchGroup:
    """Wraps the process group in which gradients are reduced.

    Args:
        process_group: a torch process group, or None for torch's default group.
        timeout_s: deadline of a collective; None: the process group's timeout.

    Raises:
        ConfigError: there is no process group, or this rank is not a member.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "there is no process group: call torch.distributed."
                "init_process_group() first, or pass process_group="
            )
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            "expected process_group to be a torch.distributed process group that this "
            f"rank is in, got {process_group!r}; call init_process_group() of "
            "torch.distributed, under `elche run` too"
        )
    return TorchGroup(
        process_group, timeout_s or group_timeout_s(process_group) or DEFAULT_TIMEOUT_S
    )
