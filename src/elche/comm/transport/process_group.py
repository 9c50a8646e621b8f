"""elche's own process group: gloo on a chosen interface, never torch's default group.

The rendezvous uses the control channel, so it needs no further port. gloo listens on
loopback unless an address is given.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, final
from weakref import WeakSet

import torch
from torch import distributed as dist

from elche.comm.control.addresses import host_name
from elche.devices.backends import gloo_takes
from elche.errors import CommunicationError, DeadlineError
from elche.torch_internals.groups import gloo_options

FORK_MAY_DEADLOCK = sys.version_info < (3, 10, 15) or (
    (3, 11) <= sys.version_info < (3, 11, 10)
)
"""True if a forked process can hang when another thread enters Python meanwhile.

python/cpython#112275: the lock of the thread list stays locked in the child.
"""
LOOK_S = 0.005
SPIN_S = 20e-6
SLEEP_S = 50e-6
CHECK_EVERY_S = 0.05
KEPT_TENSORS = 16
"""Number of collectives whose tensors are kept, so gloo's threads do not free them."""


class RendezvousChannel(Protocol):
    """Store in which the ranks of a group publish their addresses.

    Implemented by the control channel to the coordinator.
    """

    def store_set(self, key: str, value: bytes) -> None:
        """Publishes a value for other ranks."""

    def store_get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value that a rank publishes; raises at the timeout."""


class _ControlStore(dist.Store):
    """A rendezvous store behind the control channel, for one generation."""

    def __init__(
        self, channel: RendezvousChannel, prefix: str, timeout_s: float
    ) -> None:
        super().__init__()
        self._channel = channel
        self._prefix = prefix
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._channel.store_set(self._prefix + key, raw)

    def get(self, key: str) -> bytes:
        return self._channel.store_get(self._prefix + key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class _Alone:
    """Substitute for torch's group and work handle with one rank; sends nothing."""

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> _Alone:
        """Returns a completed work: the tensor is its own sum."""
        return self

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Alone:
        """Returns a completed work: rank 0 is the only rank."""
        return self

    def is_completed(self) -> bool:
        """Returns True: the work is complete from the start."""
        return True

    def wait(self) -> None:
        """Returns at once: there is no other rank."""

    def shutdown(self) -> None:
        """Does nothing: no connection was opened."""


@final
class HostWork:
    """A collective on a copy in host memory, for devices that gloo does not take.

    The copy waits for the device: a collective that began later would have another
    place in the ranks' common order.

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


class Group:
    """A process group of one generation.

    Args:
        process_group: torch's group object.
        rank: this rank's place in the group.
        world_size: number of ranks in the group.
        timeout_s: deadline of a collective.

    Attributes:
        devices: group for device tensors (`device_group`), or None.
        host_leaders: leaders for sums between hosts (`host_exchange`) if ranks share
            memory within their hosts, or None.
        ranks: ranks in the run by place in the group, for errors.
        transfers: memory of rank-to-rank messages that gloo may be using.
        exchanges: coded exchanges with a message in flight.
    """

    def __init__(
        self, process_group: Any, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self._process_group = process_group
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.on_failure: Callable[[str, Sequence[int]], Exception] = late_error
        self.check: Callable[[], None] = lambda: None  # nothing ends the run
        self.shares_host = False
        self.ranks: Sequence[int] = range(world_size)
        self.devices: Any = None
        self.host_leaders: Any = None
        self.host = host_name()
        self._hosts: tuple[str, ...] | None = None
        self._at_close: list[Callable[[], None]] = []
        self.transfers: dict[Any, torch.Tensor] = {}
        self.exchanges: WeakSet[Any] = WeakSet()
        self._works: list[Any] = []
        self._kept: deque[torch.Tensor] = deque(maxlen=KEPT_TENSORS)

    @property
    def transport(self) -> str:
        """Name of the transport between the group's ranks."""
        if self.world_size == 1:
            return "none, on one device"
        if self.devices is not None:
            return str(self.devices.backend)
        is_one_host = len(set(self._hosts or ())) < 2  # True until hosts are known
        return "shared memory" if self.shares_host and is_one_host else "gloo"

    @property
    def has_ended(self) -> bool:
        """True if the group was closed or left."""
        return self._process_group is None

    @staticmethod
    def alone(timeout_s: float) -> Group:
        """Makes a group of one rank, without threads or sockets."""
        return Group(_Alone(), 0, 1, timeout_s)

    @staticmethod
    def form(
        channel: RendezvousChannel,
        rank: int,
        world_size: int,
        generation: int | str,
        listen: str,
        timeout_s: float,
    ) -> Group:
        """Forms the group with all ranks of a generation.

        Args:
            channel: channel to the coordinator, used for the rendezvous.
            rank: this rank's place in the group.
            world_size: number of ranks of the group.
            generation: name of the group, unique within the run.
            listen: address that gloo listens on.
            timeout_s: deadline of forming the group, and of a collective.

        Raises:
            CommunicationError: a rank did not join in time.
        """
        options = gloo_options(timedelta(seconds=timeout_s), listen)
        store = _ControlStore(channel, f"generation/{generation}/", timeout_s)
        try:
            made = dist.ProcessGroupGloo(store, rank, world_size, options)
        except CommunicationError:  # the control channel's error is more precise
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {rank}: the process group did not form: {error}"
            ) from error
        return Group(made, rank, world_size, timeout_s)

    @property
    def native(self) -> Any:
        """Torch's group, or its substitute on one rank; raises once it has ended."""
        if self._process_group is None:
            raise CommunicationError(
                f"the process group of {self.world_size} ranks has ended on rank "
                f"{self.rank}; start a new run"
            )
        return self._process_group

    def hosts(self) -> tuple[str, ...]:
        """Returns the names of the ranks' hosts; the first call is collective."""
        if self._hosts is None:
            self._hosts = tuple(gather_texts(self, self.host, "naming hosts"))
        return self._hosts

    def all_reduce_async(self, tensor: torch.Tensor) -> Any:
        """Begins an in-place all-reduce (sum) of ``tensor``; see :meth:`wait`."""
        native = self.native
        if self.devices is not None and tensor.device.type != "cpu":
            return self.devices.all_reduce_async(tensor)
        return self._begin(tensor, lambda each: native.allreduce([each]))

    def wait(self, work: Any, what: str) -> None:
        """Waits for a collective.

        Raises:
            CommunicationError: the collective failed; names the failed rank if known.
        """
        is_on_host = isinstance(work, HostWork)
        if isinstance(gloo_work := work.work if is_on_host else work, dist.Work):
            self._poll(gloo_work)
        try:
            work.wait()
            if is_on_host:
                work.put_back()
        except CommunicationError:  # a DeviceWork has found the reason already
            raise
        except RuntimeError as error:
            failure = f"{what} failed on rank {self.ranks[self.rank]}: {error}"
            raise self.on_failure(failure, ()) from error

    def _poll(self, work: dist.Work) -> None:
        """Sleeps until a collective ends, and calls :attr:`check` periodically.

        gloo itself ends a collective only at its own deadline.
        """
        pause = timedelta(seconds=CHECK_EVERY_S)
        while not work.is_completed():
            try:
                work.wait(pause)
            except RuntimeError:
                if not work.is_completed():
                    self.check()

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Waits for other ranks without a collective.

        Args:
            ready: returns True when the wait is over.
            what: description of the wait for errors.
            missing: returns the ranks that have not arrived, if known.

        Raises:
            CommunicationError: the deadline passed; :attr:`check` may raise others.
        """

        def late() -> list[int]:
            return [self.ranks[each] for each in (missing() if missing else ())]

        started_s = checked_s = time.perf_counter()
        while not ready():
            now_s = time.perf_counter()
            if now_s - checked_s > CHECK_EVERY_S:
                checked_s = now_s
                try:
                    self.check()
                except DeadlineError as error:  # the late ranks are known here
                    raise late_error(f"{error}; {what}", late()) from error
                is_over = now_s - started_s > self.timeout_s
                if is_over and (missing is None or late()):  # else it has just arrived
                    failure = f"{what} did not end within {self.timeout_s:g} s"
                    failure += f" on rank {self.ranks[self.rank]}"
                    raise self.on_failure(failure, late())
            if now_s - started_s > SPIN_S:  # spin only briefly
                time.sleep(SLEEP_S)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """Sums ``tensor`` over all ranks, in place."""
        self.wait(self.all_reduce_async(tensor), what)

    def broadcast(self, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        """Broadcasts one rank's ``tensor`` to all ranks, in place."""
        native = self.native
        work = self._begin(tensor, lambda each: native.broadcast(each, source))
        self.wait(work, what)

    def _begin(
        self, tensor: torch.Tensor, collective: Callable[[torch.Tensor], Any]
    ) -> Any:
        """Begins a collective, on the host if gloo does not take the device's tensor.

        Works are recorded, since they may be pending when the group is left.
        """
        taken = gloo_takes(tensor)
        near = tensor if taken else tensor.to("cpu", copy=True)
        self._keep(near)
        work = collective(near)
        self._works = [w for w in self._works if not w.is_completed()]
        self._works.append(work)
        return work if taken else HostWork(work, near, tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keeps a view so that gloo's thread releases ``tensor`` without the GIL.

        Dropping torch's last reference to a tensor that Python holds takes the GIL.
        gloo's thread does that just after a wait, when an epoch begins and the loader
        forks its workers. If ``FORK_MAY_DEADLOCK``, about one worker in some thousand
        then hung. The view is one more reference.
        """
        if FORK_MAY_DEADLOCK:
            with torch.no_grad():
                self._kept.append(tensor.view_as(tensor))

    def at_close(self, end: Callable[[], None]) -> None:
        """Registers a callback that runs before the group is closed or left."""
        self._at_close.append(end)

    def leave(self) -> None:
        """Leaves the group without closing it, since collectives may never end.

        Called when a rank has died. Pending works and their tensors are kept, because
        gloo waits for them when it closes a group.
        """
        self._end_users()
        if self._process_group is not None and self.world_size > 1:
            _left.append((self._process_group, self._works, self))
        self._process_group, self._works = None, []

    def _end_users(self) -> None:
        while self._at_close:
            self._at_close.pop()()
        devices, self.devices = self.devices, None
        if devices is not None:
            devices.close()

    def close(self) -> None:
        """Closes the group; an open gloo group aborts the interpreter's exit."""
        self._end_users()
        # A reference to a work would keep the connections open.
        self._works = []
        if self._process_group is not None:
            self._process_group.shutdown()
            self._process_group = None


_left: list[tuple[Any, list[Any], Group]] = []
"""Left groups with their works; the `Group` keeps memory that others send to."""


def end_left_groups(timeout_s: float) -> bool:
    """Closes left groups that have no pending collectives.

    A collective fails at once on a dead rank's neighbors, and on other ranks when the
    neighbors close their groups. So this may take a moment.

    Args:
        timeout_s: time to wait for pending collectives.

    Returns:
        True if all left groups have been closed.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        for left in list(_left):
            made, works, _ = left
            if all(work.is_completed() for work in works):
                _left.remove(left)
                made.shutdown()
        if not _left or time.monotonic() >= deadline_s:
            return not _left
        time.sleep(LOOK_S)


def keep_left_groups() -> None:
    """Leaks hanging groups, so that the interpreter's exit does not wait for them.

    A group hangs if a rank's machine neither answers nor closes its connections.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_left))


def late_error(text: str, missing: Sequence[int]) -> CommunicationError:
    """Makes the error of a failed wait; ``missing`` are the ranks that timed out."""
    if not missing:
        return CommunicationError(text)
    names = ", ".join(map(str, missing))
    return DeadlineError(f"{text}; ranks that did not arrive: {names}")


def gather_texts(group: Group, text: str, what: str) -> list[str]:
    """Gathers every rank's text in rank order; a collective call."""
    raw = text.encode()
    lengths = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    lengths[group.rank] = len(raw)
    group.all_reduce(lengths, what)
    sizes: list[int] = lengths.tolist()
    rows = torch.zeros(
        group.world_size, max(sizes) + 1, dtype=torch.uint8, device="cpu"
    )
    if raw:
        rows[group.rank, : len(raw)] = torch.frombuffer(
            bytearray(raw), dtype=torch.uint8
        )
    group.all_reduce(rows, what)
    return [
        bytes(row[:size].tolist()).decode()
        for row, size in zip(rows, sizes, strict=True)
    ]


def gather_values(group: Group, value: Any, what: str) -> list[Any]:
    """Gathers every rank's value, which JSON can hold; a collective call."""
    return [json.loads(text) for text in gather_texts(group, json.dumps(value), what)]
