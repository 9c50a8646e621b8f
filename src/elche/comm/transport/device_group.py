"""Sums among CUDA devices without a copy through the host: NCCL, where it serves.

The rule: all ranks are on one host, and each has a CUDA device of its own (NCCL takes
no device twice; two ranks on one device sum through gloo). A group is tried before it
is used, by all ranks together, and given up by all of them if it fails on one.

The version of NCCL that meets there, and several devices, have not been at hand yet:
what is tested is the rule, the trial, and the way of a message, with another backend in
NCCL's place.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
from torch import distributed as dist

from elche.comm.transport.process_group import Group, gather_texts
from elche.errors import CommunicationError, ElcheError
from elche.torch_internals.groups import nccl_options

TRIAL_S = 60.0
"""How long forming and trying may take, less than any deadline of a run."""
TRIED_ELEMENTS = 1024
TRIAL = "elche device trial"
LATE = "it did not form in time"
Former = Callable[[Path, int, int, timedelta], Any]
Attempt = Callable[[Any, Group, torch.device], str]
_log = logging.getLogger(__name__)


def serves(places: Sequence[tuple[str, str]]) -> bool:
    """Whether NCCL can sum for these ranks.

    Args:
        places: host and device of each rank; "" for a device that it cannot use.
    """
    hosts, devices = zip(*places, strict=True) if places else ((), ())
    return (
        len(places) > 1
        and all(devices)
        and len(set(hosts)) == 1
        and len(set(devices)) == len(devices)
    )


def device_name(device: torch.device) -> str:
    """Names a device, the same for all processes of a host; "" if NCCL cannot use it.

    CUDA_VISIBLE_DEVICES may give one device another number in each process.
    """
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", device.index))


def open_device_group(
    group: Group,
    device: torch.device,
    timeout_s: float,
    form: Former | None = None,
    name: Callable[[torch.device], str] = device_name,
    attempt: Attempt | None = None,
) -> DeviceGroup | None:
    """Forms and tries a group for tensors on the ranks' devices, with all ranks.

    Args:
        group: the ranks' group on the host.
        device: this rank's.
        timeout_s: deadline of forming and of a collective.
        form: makes torch's group from a file that all ranks see, rank, world size and
            deadline; None is NCCL.
        name: see :func:`device_name`.
        attempt: tries what was formed and returns what went wrong, "" if nothing did;
            None sums.

    Returns:
        The group, or None where it does not serve; then nothing is left of it.

    Raises:
        CommunicationError: the ranks did not come together on the host.
    """
    hosts, own = group.hosts(), name(device)
    named = gather_texts(group, own, "naming devices")
    if not serves(list(zip(hosts, named, strict=True))):
        return None
    folder = tempfile.TemporaryDirectory() if group.rank == 0 else None
    place = "" if folder is None else folder.name
    place = gather_texts(group, place, "meeting for devices")[0]
    trial = _Trial(group, device, timeout_s, form or nccl_group, attempt or _sum)
    errors = gather_texts(group, trial.run(Path(place, "store")), "trying devices")
    failed = [rank for rank, each in enumerate(errors) if each]
    found = DeviceGroup(trial.made, group, folder)
    if not failed:
        return found
    if group.rank == 0:  # others are late where one has failed
        rank = next((rank for rank in failed if errors[rank] != LATE), failed[0])
        _log.warning(
            "NCCL does not serve (rank %d: %s); tensors pass through the host",
            rank,
            errors[rank],
        )
    found.close()
    return None


@final
class DeviceGroup:
    """Ranks that sum on their devices; made by :func:`open_device_group`.

    Args:
        made: torch's group, or what was formed in its place; or None.
        group: the same ranks on the host.
        folder: where they have met, removed with the group; only on rank 0.
    """

    def __init__(
        self, made: Any, group: Group, folder: tempfile.TemporaryDirectory[str] | None
    ) -> None:
        self.made = made
        self._group = group
        self._folder = folder

    def all_reduce_async(self, tensor: torch.Tensor) -> DeviceWork:
        """Begins the sum of ``tensor`` over all ranks, in place, on their devices."""
        return DeviceWork(self.made.allreduce([tensor]), self._group)

    def close(self) -> None:
        """Ends it at once: what is under way is not waited for."""
        made, self.made = self.made, None
        end_at_once(made)
        if self._folder is not None:
            self._folder.cleanup()


def end_at_once(made: Any) -> None:
    """Ends a group of torch's: what is under way is not waited for."""
    for end in ("abort", "shutdown"):
        if hasattr(made, end):
            with contextlib.suppress(RuntimeError):
                getattr(made, end)()
            break


@final
class _Trial:
    """Forms a group and tries it, in a thread of its own.

    NCCL has calls that wait for the other ranks without a deadline.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        timeout_s: float,
        form: Former,
        attempt: Attempt,
    ) -> None:
        self._group = group
        self._device = device
        self._timeout_s = timeout_s
        self._form = form
        self._attempt = attempt
        self._error = ""
        self.made: Any = None

    def run(self, store: Path) -> str:
        """Returns what went wrong; "" if nothing did."""
        thread = threading.Thread(
            target=self._try, args=(store,), name=TRIAL, daemon=True
        )
        thread.start()
        thread.join(min(TRIAL_S, self._timeout_s / 2))
        if thread.is_alive():
            return LATE
        return self._error

    def _try(self, store: Path) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            rank, world_size = self._group.rank, self._group.world_size
            deadline = timedelta(seconds=self._timeout_s)
            self.made = self._form(store, rank, world_size, deadline)
            self._error = self._attempt(self.made, self._group, self._device)
        except (RuntimeError, ElcheError, OSError) as error:
            self._error = str(error) or type(error).__name__


def _sum(made: Any, group: Group, device: torch.device) -> str:
    """Sums something known."""
    found = torch.full((TRIED_ELEMENTS,), group.rank + 1.0, device=device)
    made.allreduce([found]).wait()
    expected = group.world_size * (group.world_size + 1) / 2
    if found.tolist() != [expected] * TRIED_ELEMENTS:
        return f"expected sums of {expected}, got {found[:4].tolist()}"
    return ""


def nccl_group(store: Path, rank: int, world_size: int, deadline: timedelta) -> Any:
    """NCCL among processes of one host, which meet in a file."""
    meeting = dist.FileStore(str(store), world_size)
    meeting.set_timeout(deadline)
    return dist.ProcessGroupNCCL(meeting, rank, world_size, nccl_options(deadline))


@final
class DeviceWork:
    """A sum under way among devices, waited for like one of the host's.

    Args:
        work: torch's handle.
        group: the ranks' group on the host: it has the deadline, and sees who is gone.
    """

    def __init__(self, work: Any, group: Group) -> None:
        self._work = work
        self._group = group

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would not wait."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Waits until it is done, and orders the caller's stream behind it.

        Raises:
            CommunicationError: the deadline has passed, or a rank is gone.
        """
        self._group.wait_until(self.is_completed, "a sum among CUDA devices")
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CommunicationError(str(error)) from error
