"""Which hosts go on: never two sides, whatever is lost, late, cut or asked first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.succession import (
    Quorum,
    Verdict,
    Witness,
    can_be_succeeded,
    has_majority,
)
from tests.harness.reached import reach

LEADER = 0
View = tuple[int, int | None, tuple[frozenset[int], ...]]
Move = tuple[Any, ...]


class Hosts:
    """Launchers with messages under way; each link may end at each moment.

    Args:
        count: of hosts.
        has_witness: there is one.
    """

    def __init__(self, count: int, *, has_witness: bool) -> None:
        self.has_witness = has_witness
        self.quorum = Quorum(LEADER, range(count), has_witness=has_witness)
        self.witness = Witness()
        self.others = range(1, count)
        self.known: dict[int, View] = {}
        self.coming: dict[int, list[View]] = {h: [] for h in self.others}
        self.going: dict[int, list[int]] = {h: [] for h in self.others}
        self.linked = set(self.others)
        self.gone_to: dict[int, int | None] = {}  # who has given the leader up
        self.ended: set[int] = set()
        self.answered: list[tuple[int, bool]] = []
        self.asked = -1
        self.begun: set[int] = set()
        self.is_over = False
        self.settled = 0
        self.change()

    def change(self, *lost: int, is_outlived: bool = True) -> None:
        view = self.quorum.change(lost=lost, is_outlived=is_outlived)
        if view is not None and self.quorum.verdict in (
            Verdict.WAITS,
            Verdict.NEEDS_VOTE,
        ):
            self.send()
        self.review()

    def send(self) -> None:
        view = self.quorum.view
        chain = tuple(each.hosts for each in self.quorum.chain)
        for host in self.linked & view.hosts:
            self.coming[host].append((view.number, view.successor, chain))

    def review(self) -> None:
        self.is_over |= self.quorum.verdict is Verdict.OVER
        view = self.quorum.view
        if self.quorum.verdict is Verdict.SETTLED and view.number > self.settled:
            self.settled = view.number
            self.send()

    def moves(self) -> Iterator[Move]:
        """All that may happen next."""
        if not self.is_over:
            for host in self.linked:
                yield "lose", host
                if self.going[host]:
                    yield "take", host
                if host in self.ended and host not in self.quorum._ended:
                    yield "hear of an end", host
            needs = self.quorum.verdict is Verdict.NEEDS_VOTE
            if needs and self.asked < self.quorum.view.number:
                yield ("ask",)
            if self.answered:
                yield ("answer",)
        for host in self.others:
            if host in self.gone_to:
                is_next = self.gone_to[host] == host and host not in self.begun
                if is_next and host not in self.ended:
                    yield "begin", host
                continue
            if self.coming[host]:
                yield "bring", host
            yield "give up", host

    def do(self, move: Move) -> None:
        what, *rest = move
        host = rest[0] if rest else -1
        quorum = self.quorum
        if what == "lose":
            self.linked.discard(host)
            self.change(host)
        elif what == "take":
            quorum.take(host, self.going[host].pop(0), 0)
            self.review()
        elif what == "end":
            self.ended.add(host)
        elif what == "hear of an end":
            quorum.end(host)
            self.change()
        elif what == "mortal":
            self.change(is_outlived=False)
        elif what == "ask":
            number = self.asked = quorum.view.number
            self.answered.append((number, self.witness.ask("run", LEADER, number)))
        elif what == "answer":
            number, is_given = self.answered.pop(0)
            if is_given:
                quorum.vote(number)
                self.review()
            elif quorum.verdict is Verdict.NEEDS_VOTE:
                self.is_over = True
        elif what == "bring":
            view = self.coming[host].pop(0)
            if host not in self.known or view[0] >= self.known[host][0]:
                self.known[host] = view
            self.going[host].append(self.known[host][0])
        elif what == "give up":
            # Whose ranks have all ended goes nowhere.
            has_view = host in self.known and host not in self.ended
            self.gone_to[host] = self.known[host][1] if has_view else None
            self.coming[host].clear()
        elif what == "begin":
            self.begin(host)

    def begin(self, host: int) -> None:
        number, _, chain = self.known[host]
        came = {each for each, where in self.gone_to.items() if where == host}
        for has_vote in (False, True):
            if has_vote and not self.has_witness:
                break
            may = has_majority(
                chain, came, has_vote=has_vote, has_witness=self.has_witness
            )
            if may and (not has_vote or self.witness.ask("run", host, number)):
                self.begun.add(host)
                reach("by the witness", has_vote)
                break

    def leader_commits(self) -> bool:
        """Whether the leading host may tell its ranks anything new."""
        if self.is_over or self.quorum.verdict is not Verdict.SETTLED:
            return False
        successor = self.quorum.view.successor
        return successor is None or successor not in self.gone_to

    def check(self) -> None:
        sides = len(self.begun) + (bool(self.begun) and self.leader_commits())
        assert sides <= 1, (self.begun, self.quorum.chain)

    def key(self) -> str:
        quorum = self.quorum
        return repr(
            (
                *(quorum._views, sorted(quorum._having.items()), sorted(quorum._ended)),
                *(quorum._voted, self.witness._runs, sorted(self.known.items())),
                *(self.coming, self.going, sorted(self.linked), self.answered),
                *(sorted(self.gone_to.items()), self.asked, sorted(self.begun)),
                *(self.is_over, self.settled),
            )
        )


@pytest.mark.parametrize(
    ("count", "has_witness", "least"),
    [
        (2, True, 200),
        (3, False, 2000),
        pytest.param(3, True, 5000, marks=pytest.mark.slow),
    ],
)
def test_no_order_of_losses_and_messages_has_two_sides_go_on(
    count: int, has_witness: bool, least: int
) -> None:
    """All states that few hosts can come to."""
    first = Hosts(count, has_witness=has_witness)
    seen, waiting = {first.key()}, [first]
    outcomes = set[tuple[bool, ...]]()
    while waiting:
        hosts = waiting.pop()
        hosts.check()
        outcomes.add((bool(hosts.begun), hosts.leader_commits(), hosts.is_over))
        for move in [*hosts.moves()]:
            later = copy.deepcopy(hosts)
            later.do(move)
            if (key := later.key()) not in seen:
                seen.add(key)
                waiting.append(later)
    assert len(seen) > least
    # A successor goes on, or the leading host does, or neither.
    assert {(True, False, True), (False, True, False), (False, False, True)} <= outcomes


@pytest.mark.reaches("a successor", "the leader alone", "by the witness", "ends")
@given(
    count=st.integers(2, 7),
    has_witness=st.booleans(),
    choices=st.lists(st.integers(0, 10_000), min_size=30, max_size=120),
    ends=st.dictionaries(st.integers(0, 60), st.integers(1, 6), max_size=2),
    mortal=st.sets(st.integers(0, 60), max_size=2),
)
@settings(max_examples=1500, deadline=None)
def test_nor_among_more_hosts(
    count: int,
    has_witness: bool,
    choices: list[int],
    ends: dict[int, int],
    mortal: set[int],
) -> None:
    hosts = Hosts(count, has_witness=has_witness)
    for number, choice in enumerate(choices):
        if ends.get(number, count) < count:
            hosts.do(("end", ends[number]))
            reach("ends")
        if number in mortal and not hosts.is_over:
            hosts.do(("mortal",))
            hosts.check()
        moves = [*hosts.moves()]
        if not moves:
            break
        hosts.do(moves[choice % len(moves)])
        hosts.check()
    reach("a successor", bool(hosts.begun))
    reach("the leader alone", hosts.leader_commits() and not hosts.linked)


def settled(count: int, *, has_witness: bool = False) -> Quorum:
    quorum = Quorum(LEADER, range(count), has_witness=has_witness)
    assert quorum.change() is not None
    for host in range(1, count):
        quorum.take(host, quorum.view.number, 3)
    assert quorum.verdict is Verdict.SETTLED
    return quorum


def test_the_journal_is_written_when_the_successor_has_it() -> None:
    quorum = settled(3)
    assert quorum.view.successor == 1
    assert quorum.written(10) == 3
    quorum.take(2, 1, 9)
    assert quorum.written(10) == 3
    quorum.take(1, 1, 7)
    assert quorum.written(10) == 7


def test_one_after_the_other_is_lost_down_to_the_leading_host() -> None:
    quorum = settled(3)
    quorum.change(lost=[1])
    assert quorum.verdict is Verdict.WAITS  # host 2 has not heard
    assert quorum.written(10) == 0
    quorum.take(2, quorum.view.number, 3)
    assert quorum.verdict is Verdict.SETTLED
    assert quorum.view.successor is None  # of two equal sides its own goes on
    quorum.change(lost=[2])
    assert quorum.verdict is Verdict.SETTLED
    assert quorum.written(10) == 10


@pytest.mark.parametrize(
    ("count", "lost", "verdict"),
    [
        (2, [1], Verdict.SETTLED),
        (3, [1, 2], Verdict.OVER),
        (4, [1, 2], Verdict.WAITS),
        (4, [1, 2, 3], Verdict.OVER),
        (5, [2, 3, 4], Verdict.OVER),
    ],
)
def test_half_of_the_hosts_go_on_with_the_leading_one(
    count: int, lost: list[int], verdict: Verdict
) -> None:
    quorum = settled(count)
    quorum.change(lost=lost)
    assert quorum.verdict is verdict


def test_a_witness_has_one_vote() -> None:
    quorum = settled(2, has_witness=True)
    quorum.change(lost=[1])
    assert quorum.verdict is Verdict.NEEDS_VOTE
    quorum.vote(quorum.view.number)
    assert quorum.verdict is Verdict.SETTLED
    witness = Witness()
    assert witness.ask("a", LEADER, 2)
    assert not witness.ask("a", 1, 1)  # it does not know what the vote was for
    assert witness.ask("b", 1, 1)
    assert not witness.ask("b", LEADER, 2)
    assert not witness.ask("b", 2, 5)
    assert witness.ask("b", 1, 1)


def test_who_has_seen_all_ranks_end_counts_no_more() -> None:
    quorum = settled(3)
    quorum.end(1)
    quorum.change()
    assert quorum.view.successor is None  # two are left
    quorum.take(2, quorum.view.number, 3)
    quorum.change(lost=[1, 2])
    assert quorum.verdict is Verdict.SETTLED


def test_two_hosts_alone_have_no_successor() -> None:
    assert not can_be_succeeded(2, has_witness=False)
    assert can_be_succeeded(2, has_witness=True)
    assert not can_be_succeeded(1, has_witness=True)
    quorum = Quorum(LEADER, [0, 1])
    assert quorum.change() is None
    assert not has_majority([{0, 1}], {1}, has_vote=False, has_witness=False)
