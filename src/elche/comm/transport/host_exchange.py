"""Hierarchical sums: inside each host in shared memory, then between the hosts.

A host has one link however many ranks it has. So ranks write what they have where their
host's first rank, its *leader*, reads it; the leaders sum the hosts' sums through gloo,
in place, and every rank reads what comes of it::

    slot of each rank ──sum──▶ sum of the host ──gloo, leaders──▶ sum of all, for all
                                   └────────── the same memory ──────┘

gloo sums in a ring. One of W ranks, host after host, sends 2 (W - 1) / W of a message
over each host's link, in each direction; the leaders' of H hosts 2 (H - 1) / H.

All ranks get the bits that gloo gave the leaders. What a leader does for its host it
does in its own thread, whenever it looks for a sum (:meth:`HostLeaders.drive`): in the
hooks of its backward pass, and while it waits.
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
    """True if there are several hosts, and ranks that share one."""
    return 1 < len(set(hosts)) < len(hosts)


def leaders_of(hosts: Sequence[str]) -> list[int]:
    """The first rank of every host, in their order."""
    return sorted(hosts.index(host) for host in set(hosts))


@final
class HostLeaders:
    """Sums between hosts, begun in the order in which all ranks begin them.

    Args:
        group: of all ranks; ranks of one host may share memory.
        form: forms the group of some of them, given their ranks in the run.

    Attributes:
        members: places of the ranks of this host; the first one leads.
    """

    def __init__(self, group: Group, form: Callable[[Sequence[int]], Group]) -> None:
        self._group = group
        self._form = form
        self._leaders: Group | None = None
        self.members: Sequence[int] = ()
        self._waiting: deque[HostExchange] = deque()
        self._under_way: list[HostExchange] = []

    def settle(self) -> bool:
        """Elects a leader per host, with all ranks; True if sums go by hosts.

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
            self._leaders = self._form([ranks[at] for at in leaders_of(hosts)])
            self._group.at_close(self._leave)
        return True

    def begin(self, exchange: HostExchange) -> None:
        """Takes a message that this rank has written."""
        if self._leaders is not None:
            self._waiting.append(exchange)

    def drive(self) -> None:
        """Does for this host what can be done now, if this rank leads it."""
        if self._leaders is None:
            return
        while self._waiting and self._waiting[0].is_offered:
            exchange = self._waiting.popleft()
            exchange.begin_between(self._leaders)
            self._under_way.append(exchange)
        self._under_way = [each for each in self._under_way if not each.hand_on()]

    def explain(self, work: Any, what: str) -> None:
        """Raises why a sum of the leaders failed."""
        assert self._leaders is not None
        self._leaders.wait(work, what)

    def _leave(self) -> None:
        """Nothing is begun any more; what is under way is left to itself.

        Its memory is let go: the group and this know each other, and may stay for long.
        """
        leaders, self._leaders = self._leaders, None
        self._waiting.clear()
        self._under_way.clear()
        if leaders is not None:
            leaders.leave()


@final
class HostExchange(MemoryExchange):
    """A message that is summed inside hosts first. Made by :func:`open_by_hosts`.

    Behind the slots of a host's memory lie one or two sums, whose number has a counter.
    With two sums the last one stays until the next has come: another host may lack it.
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
        self._sums = self._places[len(members) :]
        self._taken = 0
        self._work: Any = None  # between hosts, on the leader
        self._has_failed = False

    @property
    @override
    def extra_bytes(self) -> int:
        """This rank's part of the memory of sums."""
        return sum(each.nbytes for each in self._sums) // len(self._members)

    @property
    def last_sum(self) -> torch.Tensor:
        """The one that this rank has taken last, as it came."""
        return self._sums[self._taken % len(self._sums)]

    @override
    def begin(self, side: int) -> None:
        super().begin(0)
        self._work, self._has_failed = None, False
        self._leaders.begin(self)

    @property
    def is_offered(self) -> bool:
        """True if all ranks of this host have written it."""
        return self._is_written()

    @torch.no_grad()
    def begin_between(self, leaders: Group) -> None:
        """Sums what the host has, and begins with the other hosts; on the leader."""
        total, (first, *others) = self._total, self._slots(0)
        if others:
            torch.add(first, others[0], out=total)
        else:
            total.copy_(first)
        for slot in others[1:]:
            total.add_(slot)
        self._work = leaders.all_reduce_async(total)

    def hand_on(self) -> bool:
        """Lets the host's ranks read what has come; whether the sum is over."""
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
            return self.is_offered

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
    group: Group,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sums: int = 1,
) -> Exchange:
    """Makes an exchange of one side, together with all ranks; inside hosts first.

    As :func:`open_exchange` does where all ranks are on one host, each is on its own,
    or one of them cannot share memory.

    Args:
        group: the process group.
        numel: elements of a message.
        dtype: of the message.
        device: where it lives.
        sums: places of sums in a host's memory; with two the last one stays until the
            next has come.
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
