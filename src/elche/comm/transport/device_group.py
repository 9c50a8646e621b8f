"""Sums among CUDA devices without a copy through the host: NCCL, where it serves.

The rule: all ranks are on one host, or are to be summed between hosts as well, and each
has a CUDA device of its own (NCCL takes no device twice; two ranks on one device sum
through gloo). A group is tried before it is used, by all ranks together, and given up
by all of them if it fails on one.

The version of NCCL that meets there, and several devices, have not been at hand yet:
what is tested is the rule, the trial, and the way of a message, with another backend in
NCCL's place.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
from torch import distributed as dist

from elche.comm.control.addresses import listen
from elche.comm.transport.process_group import Group, gather_texts
from elche.errors import CommunicationError, ConfigError, ElcheError
from elche.torch_internals.groups import nccl_options

TRIAL_S = 60.0
"""Deadline (s) of forming and trying a group, less than any deadline of a run."""
TRIED_ELEMENTS = 1024
LOOPBACK = "127.0.0.1"
TRIAL = "elche device trial"
LATE = "it did not form in time"
Former = Callable[[dist.Store, int, int, timedelta], Any]
Attempt = Callable[[Any, Group, torch.device], str]
_log = logging.getLogger(__name__)


def serves(places: Sequence[tuple[str, str]], *, between_hosts: bool = False) -> bool:
    """True if NCCL can sum for these ranks.

    Args:
        places: host and device of each rank; "" for a device that it cannot use.
        between_hosts: they may be on several.
    """
    return (
        len(places) > 1
        and all(device for _, device in places)
        and (between_hosts or len({host for host, _ in places}) == 1)
        and len(set(places)) == len(places)
    )


def device_name(device: torch.device) -> str:
    """Names a device, the same for all processes of a host; "" if NCCL cannot use it.

    CUDA_VISIBLE_DEVICES may give one device another number in each process.
    """
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", device.index))


def nccl_group(store: dist.Store, rank: int, size: int, deadline: timedelta) -> Any:
    """NCCL among processes that meet in a store.

    Its watchdog calls the store from its own threads: one of torch's own, therefore.
    """
    return dist.ProcessGroupNCCL(store, rank, size, nccl_options(deadline))


def sum_of_ranks(made: Any, group: Group, device: torch.device) -> str:
    """Sums something known; what went wrong, "" if nothing did."""
    found = torch.full((TRIED_ELEMENTS,), group.rank + 1.0, device=device)
    made.allreduce([found]).wait()
    expected = group.world_size * (group.world_size + 1) / 2
    if found.tolist() != [expected] * TRIED_ELEMENTS:
        return f"expected sums of {expected}, got {found[:4].tolist()}"
    return ""


@dataclass(frozen=True)
class DeviceGroupConfig:
    """Group and deadlines of a group among devices.

    Attributes:
        timeout_s: deadline of forming and of a collective.
        listen: where rank 0 has ranks of other hosts meet it, and NCCL was asked for;
            "": all are on one host, or none sums so.
        form: makes torch's group from a store, rank, world size and deadline.
        attempt: tries what was formed and returns what went wrong, "" if nothing did.
    """

    timeout_s: float
    listen: str = ""
    form: Former = nccl_group
    attempt: Attempt = sum_of_ranks


def open_device_group(
    group: Group, device: torch.device, config: DeviceGroupConfig
) -> DeviceGroup | None:
    """Forms and tries a group for tensors on the ranks' devices, with all ranks.

    Args:
        group: the ranks' group on the host.
        device: this rank's.
        config: the same on all ranks, but for addresses.

    Returns:
        The group, or None where it does not serve; then nothing is left of it.

    Raises:
        ConfigError: it fails on a rank, and was asked for, between hosts.
        CommunicationError: the ranks did not come together on the host.
    """
    hosts = group.hosts()
    named = gather_texts(group, device_name(device), "naming devices")
    places = list(zip(hosts, named, strict=True))
    if not serves(places, between_hosts=bool(config.listen)):
        return None
    served, place = None, ""
    if group.rank == 0:
        served, place = serve_store(config.listen or LOOPBACK, config.timeout_s)
    place = gather_texts(group, place, "meeting for devices")[0]
    made, error = _tried(group, device, config, place)
    errors = gather_texts(group, error, "trying devices")
    failed = [rank for rank, each in enumerate(errors) if each]
    found = DeviceGroup(made, group, served)
    if not failed:
        return found
    found.close()
    # Others are late where one has failed.
    rank = next((rank for rank in failed if errors[rank] != LATE), failed[0])
    said = f"NCCL does not serve (rank {group.ranks[rank]}: {errors[rank]})"
    if config.listen:
        raise ConfigError(
            f"{said}, which transport.kind='nccl' asks for; leave kind= out"
        )
    if group.rank == 0:
        _log.warning("%s; tensors pass through the host", said)
    return None


@final
class DeviceGroup:
    """Ranks that sum on their devices; made by :func:`open_device_group`.

    Args:
        made: torch's group, or what was formed in its place; or None.
        group: the same ranks on the host.
        served: on rank 0, the store in which they have met; ended with the group.
    """

    def __init__(self, made: Any, group: Group, served: dist.Store | None) -> None:
        self.made = made
        self._group = group
        self._served = served

    def all_reduce_async(self, tensor: torch.Tensor) -> DeviceWork:
        """Begins the sum of ``tensor`` over all ranks, in place, on their devices."""
        return DeviceWork(self.made.allreduce([tensor]), self._group)

    def close(self) -> None:
        """Ends it at once: what is under way is not waited for."""
        made, self.made = self.made, None
        end_at_once(made)
        self._served = None


def end_at_once(made: Any) -> None:
    """Ends a group of torch's: what is under way is not waited for."""
    for end in ("abort", "shutdown"):
        if hasattr(made, end):
            with contextlib.suppress(RuntimeError):
                getattr(made, end)()
            break


def serve_store(host: str, timeout_s: float) -> tuple[dist.Store, str]:
    """A store of torch's on one address alone, and that address with its port.

    Left to bind by itself it would listen on all addresses of the host.
    """
    listening = listen(host, 0)
    address, port = listening.getsockname()[:2]  # the host may be given by a name
    store = _store_at(address, port, timeout_s, listening.detach())
    return store, f"{address} {port}"


def _store_at(
    address: str, port: int, timeout_s: float, listening: int | None = None
) -> dist.Store:
    """A store at a port, which this process serves if it has the listening socket."""
    return dist.TCPStore(
        address,
        port,
        is_master=listening is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _tried(
    group: Group, device: torch.device, config: DeviceGroupConfig, place: str
) -> tuple[Any, str]:
    """A group formed and tried, and what went wrong, "" if nothing did.

    In a thread of its own: NCCL has calls that wait for others without a deadline.
    """
    made: list[Any] = [None]
    errors = [LATE]

    def attempt() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            deadline = timedelta(seconds=config.timeout_s)
            address, port = place.split()
            store = _store_at(address, int(port), config.timeout_s)
            made[0] = config.form(store, group.rank, group.world_size, deadline)
            errors[0] = config.attempt(made[0], group, device)
        except (RuntimeError, ElcheError, OSError) as error:
            errors[0] = str(error) or type(error).__name__

    thread = threading.Thread(target=attempt, name=TRIAL, daemon=True)
    thread.start()
    thread.join(min(TRIAL_S, config.timeout_s / 2))
    return made[0], errors[0]


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
        """True if :meth:`wait` would not wait."""
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
