"""Hierarchical sums: inside each host in shared memory, then between the hosts.

A host has one network link for all its ranks. So ranks write their contributions to
shared memory; the host's first rank, its *leader*, sums them; the leaders all-reduce
the hosts' sums in place through gloo, and every rank reads the result::

    slot of each rank ──sum──▶ sum of the host ──gloo, leaders──▶ sum of all, for all
                                   └────────── the same memory ──────┘

gloo reduces in a ring. A ring of all W ranks sends 2 (W - 1) / W of a message over each
host's link, in each direction; the leaders' ring of H hosts sends 2 (H - 1) / H.

All ranks get the same bits from the leaders. A leader works for its host in its own
training thread whenever it polls for a sum (:meth:`HostLeaders.drive`): in the hooks of
its backward pass, and while it waits.
"""

from __future__ import annotations

import logging
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from typing_extensions import override

from elche.comm.transport.exchange import (
    Exchange,
    MemoryExchange,
    open_exchange,
    succeeded,
)
from elche.comm.transport.process_group import Group
from elche.comm.transport.shared_memory import map_together

_log = logging.getLogger(__name__)


def spans_hosts(hosts: Sequence[str]) -> bool:
    """True if there are several hosts, and a host with several ranks."""
    return 1 < len(set(hosts)) < len(hosts)


@final
class HostLeaders:
    """Sums between hosts, in the order in which all ranks begin them.

    Args:
        group: process group of all ranks; ranks of one host may share memory.
        form: forms a group of some ranks, given their ranks in the run.

    Attributes:
        members: places of this host's ranks; the first rank is the leader.
    """

    def __init__(self, group: Group, form: Callable[[Sequence[int]], Group]) -> None:
        self._group = group
        self._form = form
        self._leaders: Group | None = None
        self.members: Sequence[int] = ()
        self._waiting: deque[HostExchange] = deque()
        self._under_way: list[HostExchange] = []

    def settle(self) -> bool:
        """Elects a leader per host; True if sums are hierarchical; a collective call.

        Raises:
            CommunicationError: the leaders' group did not form.
        """
        hosts, rank = self._group.hosts(), self._group.rank
        if not spans_hosts(hosts):
            return False
        own = hosts[rank]
        self.members = [at for at, host in enumerate(hosts) if host == own]
        if self._leaders is None and self.members[0] == rank:
            if rank == 0:
                _log.info(
                    "%d ranks on %d hosts: gradients are summed inside the hosts first",
                    len(hosts),
                    len(set(hosts)),
                )
            ranks = self._group.ranks
            leaders = sorted(hosts.index(host) for host in set(hosts))
            self._leaders = self._form([ranks[at] for at in leaders])
            self._group.at_close(self._leave)
        return True

    def begin(self, exchange: HostExchange) -> None:
        """Queues a written message for the sum between hosts, on the leader."""
        if self._leaders is not None:
            self._waiting.append(exchange)

    def drive(self) -> None:
        """Advances this host's sums without blocking, if this rank is the leader."""
        if self._leaders is None:
            return
        while self._waiting and self._waiting[0].is_written():
            exchange = self._waiting.popleft()
            exchange.begin_between(self._leaders)
            self._under_way.append(exchange)
        self._under_way = [each for each in self._under_way if not each.publish()]

    def explain(self, work: Any, what: str) -> None:
        """Raises the error of a failed sum of the leaders."""
        assert self._leaders is not None
        self._leaders.wait(work, what)

    def _leave(self) -> None:
        """Leaves the leaders' group without waiting for pending sums.

        Drops references to exchanges, because reference cycles would keep memory alive.
        """
        leaders, self._leaders = self._leaders, None
        self._waiting.clear()
        self._under_way.clear()
        if leaders is not None:
            leaders.leave()


@final
class HostExchange(MemoryExchange):
    """A message that is summed inside hosts first; made by :func:`open_by_hosts`.

    The host's shared memory holds a slot per rank, then one or two sums, and a counter
    with the number of the last sum. With two sums, the previous one is kept too, for
    hosts that have not received it.
    """

    def __init__(
        self,
        group: Group,
        leaders: HostLeaders,
        memory: mmap.mmap,
        numel: int,
        dtype: torch.dtype,
        sums: int,
    ) -> None:
        members = leaders.members
        super().__init__(group, memory, members, (numel, dtype), 1, sums)
        self._leaders = leaders
        self._taken = 0
        self._work: Any = None  # between hosts, on the leader
        self._has_failed = False

    @property
    def last_sum(self) -> torch.Tensor:
        """The unmodified sum that this rank has read last."""
        return self._sums[self._taken % len(self._sums)]

    @override
    def begin(self, side: int) -> None:
        super().begin(0)
        self._work, self._has_failed = None, False
        self._leaders.begin(self)

    @torch.no_grad()
    def begin_between(self, leaders: Group) -> None:
        """Sums the host's contributions, and begins the sum between hosts."""
        total = self._total
        self._add(0, total.numel(), total)
        self._work = leaders.all_reduce_async(total)

    def publish(self) -> bool:
        """Publishes an arrived sum to the host's ranks; True if the sum has ended."""
        if not self._work.is_completed():
            return False
        self._has_failed = not succeeded(self._work)
        if not self._has_failed:
            self._summed[0] = self._number
        return True

    @override
    def poll(self) -> bool:
        self._leaders.drive()
        return self._has_come or self._has_failed

    @override
    def wait(self, what: str) -> None:
        def offered() -> bool:
            self._leaders.drive()
            return self.is_written()

        if self._has_come:
            return
        self._group.wait_until(offered, what, self._missing)
        self._group.wait_until(self.poll, what)
        if not self._has_come:
            self._leaders.explain(self._work, what)

    @override
    def sum_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        out.copy_(self._total[start:stop])

    @override
    def release(self) -> None:
        super().release()
        self._taken = self._number

    @property
    @override
    def has_sum(self) -> bool:
        self._leaders.drive()
        return self._has_come

    @property
    def _total(self) -> torch.Tensor:
        """Memory in which this message is summed."""
        return self._sums[self._number % len(self._sums)]

    @property
    def _has_come(self) -> bool:
        return self._summed[0] >= self._number


def open_by_hosts(
    group: Group, numel: int, dtype: torch.dtype, device: torch.device, *, sums: int = 1
) -> Exchange:
    """Makes a one-sided exchange that sums inside hosts first; a collective call.

    Falls back to :func:`open_exchange` if all ranks are on one host, each rank has its
    own host, or a rank cannot share memory.

    Args:
        group: process group of all ranks.
        numel: number of elements of a message.
        dtype: dtype of the message.
        device: device of the message.
        sums: number of sums in a host's memory; with two, a sum stays until the next
            arrives.
    """
    leaders: HostLeaders | None = group.host_leaders
    may_be = leaders is not None and group.world_size > 2 and device.type == "cpu"
    if leaders is not None and may_be and numel and leaders.settle():
        members = leaders.members
        size_bytes = HostExchange.size_bytes(
            len(members), numel, dtype, len(members) + sums
        )
        memory = map_together(group, size_bytes, members[0])
        if memory is not None:
            return HostExchange(group, leaders, memory, numel, dtype, sums)
        group.host_leaders = None
    return open_exchange(group, numel, dtype, device)
