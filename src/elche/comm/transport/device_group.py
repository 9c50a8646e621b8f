"""Sums among devices through their own backend, without a copy through the host.

That backend (NCCL on CUDA) is used if each rank has its own device of one type, and all
ranks are on one host or NCCL between hosts was requested. (NCCL refuses two ranks on
one device; these sum through gloo.) All ranks try a group before its use, and drop it
if the trial fails on any.

This has not run on several real devices yet. Tests cover the rule, the trial and the
message path with another backend in place of NCCL.
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
from elche.devices import choice
from elche.devices.backends import place_of
from elche.errors import CommunicationError, ConfigError, ElcheError

TRIAL_S = 60.0
"""Upper bound (s) on forming and trying a group."""
TRIED_ELEMENTS = 1024
LOOPBACK = "127.0.0.1"
TRIAL = "elche device trial"
LATE = "it did not form in time"
Former = Callable[[dist.Store, int, int, timedelta], Any]
Attempt = Callable[[Any, Group, torch.device], str]
_log = logging.getLogger(__name__)


def serves(places: Sequence[tuple[str, str]], *, between_hosts: bool = False) -> bool:
    """True if the devices' own backend can sum for these ranks.

    Args:
        places: host of each rank and `place_of` its device.
        between_hosts: True if ranks may be on several hosts.
    """
    backends = {device.partition(" ")[0] for _, device in places}
    return (
        len(places) > 1
        and len(backends) == 1
        and "" not in backends
        and (between_hosts or len({host for host, _ in places}) == 1)
        and len(set(places)) == len(places)
    )


def sum_of_ranks(made: Any, group: Group, device: torch.device) -> str:
    """Checks an all-reduce of known values; returns the error, "" if there is none."""
    found = torch.full((TRIED_ELEMENTS,), group.rank + 1.0, device=device)
    made.allreduce([found]).wait()
    expected = group.world_size * (group.world_size + 1) / 2
    if found.tolist() != [expected] * TRIED_ELEMENTS:
        return f"expected sums of {expected}, got {found[:4].tolist()}"
    return ""


@dataclass(frozen=True)
class DeviceGroupConfig:
    """Settings of a device group.

    Attributes:
        timeout_s: deadline of forming the group and of a collective.
        form: makes torch's group from a store, rank, world size and deadline.
        listen: rank 0's rendezvous address if NCCL between hosts was requested; "":
            only within one host.
        attempt: tries the formed group and returns the error, "" if there is none.
    """

    timeout_s: float
    form: Former
    listen: str = ""
    attempt: Attempt = sum_of_ranks


def open_device_group(
    group: Group, device: torch.device, config: DeviceGroupConfig
) -> DeviceGroup | None:
    """Forms and tries a group for tensors on the ranks' devices; a collective call.

    Args:
        group: the ranks' gloo group.
        device: device of this rank.
        config: settings, the same on all ranks except for addresses.

    Returns:
        The group, or None if none can be used; then everything is closed.

    Raises:
        ConfigError: NCCL between hosts was requested, and fails on a rank.
        CommunicationError: a rank did not arrive in time.
    """
    hosts = group.hosts()
    named = gather_texts(group, place_of(device), "naming devices")
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
    backend = named[0].partition(" ")[0].upper()
    found = DeviceGroup(made, group, served, backend)
    if not failed:
        return found
    found.close()
    # If one rank fails, others time out: report the failure.
    rank = next((rank for rank in failed if errors[rank] != LATE), failed[0])
    said = f"{backend} does not serve (rank {group.ranks[rank]}: {errors[rank]})"
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
        made: torch's device group, or a test's substitute; or None.
        group: gloo group of the same ranks.
        served: on rank 0, the rendezvous store, closed with the group.
        backend: name of the backend for people.
    """

    def __init__(
        self, made: Any, group: Group, served: dist.Store | None, backend: str
    ) -> None:
        self.made, self.backend = made, backend
        self._group = group
        self._served = served

    def all_reduce_async(self, tensor: torch.Tensor) -> DeviceWork:
        """Begins an in-place all-reduce of ``tensor`` on the ranks' devices."""
        return DeviceWork(self.made.allreduce([tensor]), self._group)

    def close(self) -> None:
        """Ends the group at once, without waiting for pending collectives."""
        made, self.made = self.made, None
        end = getattr(made, "abort", getattr(made, "shutdown", None))
        if end is not None:
            with contextlib.suppress(RuntimeError):
                end()
        self._served = None


def serve_store(host: str, timeout_s: float) -> tuple[dist.Store, str]:
    """Starts a torch store on one address; returns it and "address port".

    By itself, torch's store would listen on all addresses of the host.
    """
    listening = listen(host, 0)
    address, port = listening.getsockname()[:2]  # the host may be given by a name
    store = _store_at(address, port, timeout_s, listening.detach())
    return store, f"{address} {port}"


def _store_at(
    address: str, port: int, timeout_s: float, listening: int | None = None
) -> dist.Store:
    """Opens a store at a port; this process serves it if given a listening socket."""
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
    """Forms and tries a group; returns it and the error, "" if there is none.

    Runs in a separate thread, because some NCCL calls wait without a deadline.
    """
    made: list[Any] = [None]
    errors = [LATE]

    def attempt() -> None:
        try:
            choice.use(device)
            # Later than ours: NCCL's watchdog would end the process before our error.
            deadline = timedelta(seconds=2 * config.timeout_s)
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
    """Handle of a sum among devices, with the deadline of the host's sums.

    Args:
        work: torch's handle.
        group: the ranks' gloo group, which has the deadline and detects dead ranks.
    """

    def __init__(self, work: Any, group: Group) -> None:
        self._work = work
        self._group = group

    def is_completed(self) -> bool:
        """True if :meth:`wait` would not wait."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Waits for the sum, and orders the caller's stream behind it.

        Raises:
            CommunicationError: the deadline has passed, or a rank is dead.
        """
        self._group.wait_until(self.is_completed, "a sum among devices")
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CommunicationError(str(error)) from error
