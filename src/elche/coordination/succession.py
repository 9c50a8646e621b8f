"""The decision which hosts go on where the hosts of a run lose each other. Pure.

The leading host's launcher sends *views*: who is in the run, and which host succeeds
it. Each host says which view it has. A view is *settled* when the successor that it
names has it, and at least half of the hosts of every view from the last settled one on
that names a successor; the leading host counts itself. Nothing is told to ranks before
the view is settled and its successor has the journal so far.

    leading host: view settled ──a host is lost──▶ the next view is sent ──▶ settled
                                      │ less than half is left
                                      └──▶ the witness is asked, or it ends
    successor:    the leading host is lost ──▶ who has this view comes to it
                                      │ more than half of each of those views
                                      └──▶ it leads; else it ends

Both count the same views, and a host that has come to the successor takes no view any
more: so of the two at most one goes on. `Witness` has one more vote.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import Enum
from typing import Final, final

MOST_RUNS: Final = 1000
"""Of which a witness remembers who has its vote."""


@dataclass(frozen=True, slots=True)
class View:
    """Hosts of a run, as the leading one says.

    Attributes:
        number: higher than that of each view before.
        hosts: by their node ranks, the leading one among them.
        successor: goes on if the leading one is lost; None: no host does.
    """

    number: int
    hosts: frozenset[int]
    successor: int | None = None


class Verdict(Enum):
    """What becomes of the leading host with its newest view."""

    SETTLED = "it goes on"
    WAITS = "others have to take the view first"
    NEEDS_VOTE = "it goes on if the witness says so"
    OVER = "it ends: the others may go on without it"


def can_be_succeeded(hosts: int, *, has_witness: bool) -> bool:
    """Whether more than half can be left of so many hosts without the leading one."""
    return hosts > 1 and hosts + has_witness > 2


@final
class Quorum:
    """The leading host's account of views, and of what the others have.

    Args:
        leader: the leading host.
        hosts: all, with which the run begins.
        has_witness: a witness has one more vote.
    """

    def __init__(
        self, leader: int, hosts: Iterable[int], *, has_witness: bool = False
    ) -> None:
        self._leader = leader
        self._has_witness = has_witness
        self._views = [View(0, frozenset(hosts) | {leader})]  # the first is settled
        self._having: dict[int, int] = {}  # newest view of each host
        self._pieces: dict[int, int] = {}
        self._ended: set[int] = set()
        self._unable: set[int] = set()
        self._voted = -1

    @property
    def view(self) -> View:
        """The newest."""
        return self._views[-1]

    @property
    def chain(self) -> tuple[View, ...]:
        """The last settled view, and those since."""
        return tuple(self._views)

    def change(
        self,
        *,
        lost: Iterable[int] = (),
        is_outlived: bool = True,
    ) -> View | None:
        """The next view, to be sent to its hosts; None if it would be the same.

        Args:
            lost: hosts that are gone; they never come back.
            is_outlived: the run goes on without the leading host's ranks.
        """
        hosts = self.view.hosts.difference(lost)
        successor = self._first_of(hosts) if is_outlived else None
        if (hosts, successor) == (self.view.hosts, self.view.successor):
            return None
        self._views.append(View(self.view.number + 1, hosts, successor))
        self._settle()
        return self.view

    @property
    def can_name(self) -> bool:
        """Whether a host could succeed the leading one."""
        return self._first_of(self.view.hosts) is not None

    def _first_of(self, hosts: Set[int]) -> int | None:
        others = hosts - {self._leader} - self._ended
        can = can_be_succeeded(len(others) + 1, has_witness=self._has_witness)
        return min(others - self._unable, default=None) if can else None

    def take(self, host: int, view: int, pieces: int) -> None:
        """A host has a view, and so many pieces of the journal."""
        self._having[host] = max(view, self._having.get(host, 0))
        self._pieces[host] = max(pieces, self._pieces.get(host, 0))
        self._settle()

    def end(self, host: int) -> None:
        """A host's launcher has seen all its ranks end: it can lead no more."""
        self._ended.add(host)
        self._settle()

    def rule_out(self, host: int) -> bool:
        """A host can lead no more, but counts and follows; whether that is new."""
        is_new = host not in self._unable
        self._unable.add(host)
        return is_new

    def vote(self, view: int) -> None:
        """The witness is for this view."""
        self._voted = max(self._voted, view)
        self._settle()

    @property
    def verdict(self) -> Verdict:
        """What is to be done."""
        if len(self._views) == 1:
            return Verdict.SETTLED
        hosts = self.view.hosts
        if self._has_half(hosts, has_vote=self._voted == self.view.number):
            return Verdict.WAITS
        can = self._has_witness and self._has_half(hosts, has_vote=True)
        return Verdict.NEEDS_VOTE if can else Verdict.OVER

    def written(self, pieces: int) -> int:
        """How many pieces of the journal may be acted upon, of so many there are."""
        if self.verdict is not Verdict.SETTLED:
            return 0
        successor = self.view.successor
        return pieces if successor is None else self._pieces.get(successor, 0)

    def _settle(self) -> None:
        newest = self.view
        having = {h for h, number in self._having.items() if number >= newest.number}
        having = (having & newest.hosts) | {self._leader}
        is_named = newest.successor is None or newest.successor in having
        if is_named and self._has_half(having, self._voted == newest.number):
            self._views = [newest]

    def _has_half(self, hosts: Set[int], has_vote: bool) -> bool:
        """Whether these are half of all views from which another could begin."""
        for view in self._views:
            voters = view.hosts - self._ended
            votes = len(voters & hosts) + has_vote
            if view.successor is not None and 2 * votes < self._votes(voters):
                return False
        return True

    def _votes(self, hosts: Set[int]) -> int:
        return len(hosts) + self._has_witness


def has_majority(
    chain: Iterable[Set[int]], came: Set[int], *, has_vote: bool, has_witness: bool
) -> bool:
    """Whether a successor goes on.

    Args:
        chain: hosts of the views, from the last one that was settled to its own.
        came: who has come to it, and itself.
        has_vote: the witness is for it.
        has_witness: there is one.
    """
    return all(
        2 * (len(came & hosts) + has_vote) > len(hosts) + has_witness for hosts in chain
    )


@final
class Witness:
    """One vote for each run: the leading host's, or a successor's.

    A successor gets it that knows the newest view which the vote has helped to make,
    and from then on no other host does.
    """

    def __init__(self) -> None:
        self._runs: dict[str, tuple[int, int]] = {}  # who has the vote, from which view

    def ask(self, run: str, host: int, view: int) -> bool:
        """Whether a host gets the vote.

        Args:
            run: which.
            host: who asks; 0 leads from the start.
            view: that the leading host is about to make, or a successor's own.
        """
        holder, newest = self._runs.get(run, (0, 0))
        if host != holder and (holder != 0 or view < newest):
            return False
        while len(self._runs) >= MOST_RUNS and run not in self._runs:
            self._runs.pop(next(iter(self._runs)))
        self._runs[run] = host, max(view, newest)
        return True
