"""A process group of torch's, as elche's reductions use it.

It belongs to the user: nothing here closes it. When a collective fails, the ranks that
are still there call the roll in the group's store, so that the error names those that
did not come; gloo's own error names no rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from typing_extensions import override

from elche.comm.transport.process_group import Group, late_error
from elche.ddp.turns import ADVICE
from elche.errors import CommunicationError, ConfigError, DeadlineError
from elche.torch_internals.groups import group_timeout_s

DEFAULT_TIMEOUT_S = 1800.0
ROLL_CALL_S = 2.0
ROLL_CALL_EVERY_S = 0.02


class TorchGroup(Group):
    """Wraps a ``torch.distributed`` process group.

    Args:
        process_group: the group; this rank is one of its members.
        timeout_s: deadline of a collective.

    Attributes:
        torch_group: the wrapped group.
        control_device: where small messages must be.
        activity: what the group is used for, told to other ranks when that fails.
    """

    activity = "reducing"

    def __init__(self, process_group: Any, timeout_s: float) -> None:
        super().__init__(
            process_group, process_group.rank(), process_group.size(), timeout_s
        )
        self.torch_group = process_group
        self._options = dist.AllreduceOptions()
        self._options.timeout = timedelta(seconds=timeout_s)
        self.control_device = torch.device("cpu")
        if process_group.name() == "nccl":
            self.control_device = torch.device("cuda", torch.cuda.current_device())
        self.on_failure = self._explained
        self.check = self._check
        self._pids: list[int] = []

    def watch(self, pids: Sequence[int]) -> None:
        """Ends waits in shared memory when one of these processes has ended.

        Args:
            pids: of each rank; all on this host.
        """
        self._pids = list(pids)

    @property
    @override
    def is_watched(self) -> bool:
        return bool(self._pids)  # else a death is seen by gloo alone

    def _check(self) -> None:
        for rank, pid in enumerate(self._pids):
            if _has_ended(pid):
                raise CommunicationError(f"rank {rank} is gone: its process has ended")

    @override
    def all_reduce_async(self, tensor: torch.Tensor) -> Any:
        return self.torch_group.allreduce([tensor], self._options)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """Sums in place, and waits; host tensors pass through NCCL's device."""
        on_host = tensor.device.type == "cpu"
        near = tensor.to(self.control_device) if on_host else tensor
        self.wait(self.all_reduce_async(near), what)
        if near is not tensor:
            tensor.copy_(near)

    def sibling(self) -> TorchGroup:
        """Forms another group of the same ranks, together with all of them.

        Its collectives are ordered for themselves: they may run inside a backward pass
        beside this group's. To be ended with :meth:`end`.
        """
        made = dist.new_group(
            dist.get_process_group_ranks(self.torch_group),
            timeout=self._options.timeout,
            backend=dist.get_backend(self.torch_group),
            use_local_synchronization=True,
        )
        sibling = TorchGroup(made, self._timeout_s)
        sibling.shares_host = self.shares_host
        sibling.watch(self._pids)
        return sibling

    def end(self) -> None:
        """Ends a group that was made here, unless torch has ended all of them."""
        with contextlib.suppress(ValueError):  # torch knows it no more
            if dist.is_initialized():
                dist.destroy_process_group(self.torch_group)

    def close(self) -> None:
        """Leaves the group as it is: it is the user's."""

    def _explained(self, text: str, missing: Sequence[int]) -> CommunicationError:
        silent = self._silent(missing or range(self.world_size))
        if not silent:  # all of them wait too, and elsewhere
            return CommunicationError(text + self._out_of_step())
        error = late_error(text, missing or silent)
        return DeadlineError(
            f"{error}. They have ended, hang, or skipped this step (a rank without a "
            "batch calls join_step())"
        )

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        """Those that have not reported a failure too, soon after this one."""
        store = _store_of(self.torch_group)
        missing = [rank for rank in ranks if rank != self.rank]
        if store is None:
            return []
        try:
            store.set(self._key(self.rank), self.activity.encode())
            end_s = time.monotonic() + ROLL_CALL_S
            while missing and time.monotonic() < end_s:
                missing = [rank for rank in missing if not self._has_come(store, rank)]
                time.sleep(ROLL_CALL_EVERY_S)
        except RuntimeError:  # the store's host is gone as well
            return []
        return missing

    def _out_of_step(self) -> str:
        """What the ranks were doing when it failed, if that was not the same."""
        store = _store_of(self.torch_group)
        said: list[str] = []
        with contextlib.suppress(RuntimeError, AttributeError):  # it may be gone
            said = [store.get(self._key(r)).decode() for r in range(self.world_size)]
        if len(set(said)) < 2:
            return ""
        told = ", ".join(f"rank {rank} was {what}" for rank, what in enumerate(said))
        return f"; ranks were out of step: {told}; {ADVICE}"

    def _has_come(self, store: Any, rank: int) -> bool:
        return bool(store.check([self._key(rank)]))

    def _key(self, rank: int) -> str:
        return f"elche/{self.torch_group.group_name}/failed/{rank}"


def as_group(process_group: Any, timeout_s: float | None) -> Group:
    """The group to reduce in.

    Args:
        process_group: elche's :class:`Group`, a torch process group, or None for
            torch's default one.
        timeout_s: deadline of a collective; None: the group's own.

    Raises:
        ConfigError: there is no such group, or this rank is not in it.
    """
    if isinstance(process_group, Group):
        return process_group
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
            f"rank is in, or an elche Group; got {process_group!r}"
        )
    return TorchGroup(
        process_group, timeout_s or group_timeout_s(process_group) or DEFAULT_TIMEOUT_S
    )


def control_device(group: Group) -> torch.device:
    """Where small messages of a group must be."""
    device: torch.device = getattr(group, "control_device", torch.device("cpu"))
    return device


def _has_ended(pid: int) -> bool:
    """Whether a process of this host is no more, or only waits to be collected."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def _store_of(process_group: Any) -> Any:
    """The store in which the group's ranks found each other, if it can be had."""
    with contextlib.suppress(RuntimeError, AttributeError, KeyError):
        return process_group.get_group_store()
    return None
