"""Which hosts go on: never two sides, whatever is lost, late, cut or asked first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
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
        most_pieces: of the journal that are written at most.
    """

    def __init__(self, count: int, *, has_witness: bool, most_pieces: int) -> None:
        self.most_pieces = most_pieces
        self.pieces = dict.fromkeys(range(count), 0)
        self.written = 0

        self.has_witness = has_witness
        self.quorum = Quorum(LEADER, range(count), has_witness=has_witness)
        self.witness = Witness()
        self.others = range(1, count)
        self.known: dict[int, View] = {}
        self.coming: dict[int, list[View | None]] = {h: [] for h in self.others}
        self.going: dict[int, list[tuple[int, int]]] = {h: [] for h in self.others}
        self.linked = set(self.others)
        self.gone_to: dict[int, int | None] = {}  # who has given the leader up
        self.ended: set[int] = set()
        self.unable: set[int] = set()
        self.answered: list[tuple[int, bool]] = []
        self.asked = -1
        self.begun: set[int] = set()
        self.is_over = False
        self.settled = 0
        self.change()

    def change(self, *lost: int, is_outlived: bool = True) -> None:
        view = self.quorum.change(lost=lost, is_outlived=is_outlived)
        pending = Verdict.WAITS, Verdict.NEEDS_VOTE
        if view is not None and self.quorum.verdict in pending:
            self.send()
        self.review()

    def send(self) -> None:
        view = self.quorum.view
        chain = tuple(each.hosts for each in self.quorum.chain)
        for host in self.linked & view.hosts:
            self.coming[host].append((view.number, view.successor, chain))

    def review(self) -> None:
        self.is_over |= self.quorum.verdict is Verdict.OVER
        if not self.is_over:
            written = self.quorum.written(self.pieces[LEADER])
            self.written = max(self.written, written)
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
                if host in self.unable and host not in self.quorum._unable:
                    yield "hear of the unable", host
            needs = self.quorum.verdict is Verdict.NEEDS_VOTE
            if needs and self.asked < self.quorum.view.number:
                yield ("ask",)
            if self.answered:
                yield ("answer",)
            if self.pieces[LEADER] < self.most_pieces:
                yield ("write",)
        for host in self.others:
            if host in self.gone_to:
                is_next = self.gone_to[host] == host and host not in self.begun
                if is_next and host not in self.ended | self.unable:
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
            quorum.take(host, *self.going[host].pop(0))
            self.review()
        elif what == "end":
            if host not in self.gone_to:  # nobody here hears of it any more
                self.ended.add(host)
        elif what == "hear of an end":
            quorum.end(host)
            self.change()
        elif what == "unable":
            self.unable.add(host)
        elif what == "hear of the unable":
            assert quorum.rule_out(host)
            self.change()
            assert quorum.view.successor not in quorum._unable
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
        elif what == "write":
            self.pieces[LEADER] += 1
            for each in self.linked & quorum.view.hosts:
                self.coming[each].append(None)
            self.review()
        elif what == "bring":
            view = self.coming[host].pop(0)
            if view is None:
                self.pieces[host] += 1
            elif host not in self.known or view[0] >= self.known[host][0]:
                self.known[host] = view
            number = self.known[host][0] if host in self.known else 0
            self.going[host].append((number, self.pieces[host]))
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
                assert self.pieces[host] >= self.written  # what ranks were told
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
                *(self.is_over, self.settled, self.pieces, self.written),
            )
        )


@pytest.mark.parametrize(
    ("count", "has_witness", "pieces", "least"),
    [
        (2, True, 1, 300),
        (3, False, 0, 1800),
        (3, True, 0, 3900),
        pytest.param(3, False, 1, 18_000, marks=pytest.mark.slow),
        pytest.param(3, True, 1, 39_000, marks=pytest.mark.slow),
    ],
)
def test_no_order_of_losses_and_messages_has_two_sides_go_on(
    count: int, has_witness: bool, pieces: int, least: int
) -> None:
    """All states that few hosts can come to."""
    first = Hosts(count, has_witness=has_witness, most_pieces=pieces)
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
    # A successor goes on, or the leading host does.
    assert {(True, False, True), (False, True, False)} <= outcomes


@pytest.mark.reaches(
    "a successor", "the leader alone", "by the witness", "ends", "unable"
)
@given(
    count=st.integers(2, 7),
    has_witness=st.booleans(),
    seed=st.integers(0, 2**32),
    rare=st.integers(2, 30),
    frail=st.booleans(),
)
@settings(max_examples=1000, deadline=None)
@example(  # an end after it has begun
    count=2, has_witness=True, seed=2245, rare=8, frail=False
)
def test_nor_among_more_hosts(
    count: int,
    has_witness: bool,
    seed: int,
    rare: int,
    frail: bool,
) -> None:
    """Losses are as rare as may be, so that views are settled between."""
    hosts, chance = Hosts(count, has_witness=has_witness, most_pieces=9), Random(seed)
    for _ in range(300):
        moves = [*hosts.moves()]
        if not moves:
            break
        if not hosts.is_over and chance.random() < 0.3 / rare:
            host = chance.randrange(1, count)
            rarely = [("mortal",), ("end", host), ("unable", host)]
            move = chance.choice(rarely if frail else rarely[:2])
            reach("ends", move[0] == "end")
            reach("unable", move[0] == "unable")
        else:
            weights = [1 if m[0] in ("lose", "give up") else rare for m in moves]
            (move,) = chance.choices(moves, weights)
        hosts.do(move)
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


def test_who_can_lead_no_more_still_counts() -> None:
    quorum = settled(4)
    assert quorum.rule_out(1)
    assert not quorum.rule_out(1)
    quorum.change()
    assert quorum.view.successor == 2
    assert quorum.written(10) == 0  # host 2 does not know it yet
    for host in (1, 2):
        quorum.take(host, quorum.view.number, 3)
    assert quorum.verdict is Verdict.SETTLED
    quorum.change(lost=[2, 3])
    assert quorum.verdict is Verdict.WAITS  # host 1 still counts
    quorum.take(1, quorum.view.number, 3)
    assert (quorum.verdict, quorum.view.successor) == (Verdict.SETTLED, None)


def test_where_none_can_lead_nothing_waits_for_the_others() -> None:
    quorum = settled(3)
    quorum.rule_out(1)
    quorum.rule_out(2)
    quorum.change()
    quorum.take(1, quorum.view.number, 3)
    assert (quorum.verdict, quorum.can_name) == (Verdict.SETTLED, False)
    assert quorum.written(10) == 10


def test_two_hosts_alone_have_no_successor() -> None:
    assert not can_be_succeeded(2, has_witness=False)
    assert can_be_succeeded(2, has_witness=True)
    assert not can_be_succeeded(1, has_witness=True)
    quorum = Quorum(LEADER, [0, 1])
    assert quorum.change() is None
    assert not has_majority([{0, 1}], {1}, has_vote=False, has_witness=False)


def test_a_view_is_settled_once_its_successor_has_it() -> None:
    """Else that counts an older one, and hosts which the leading host does not."""
    hosts = Hosts(5, has_witness=False, most_pieces=0)

    def bring_all(*to: int) -> None:
        for host in to:
            while hosts.coming[host]:
                hosts.do(("bring", host))
            while hosts.going[host]:
                hosts.do(("take", host))

    bring_all(1, 2, 3, 4)
    assert hosts.quorum.verdict is Verdict.SETTLED
    hosts.do(("lose", 4))
    bring_all(2, 3)
    for move in [("give up", 4), ("give up", 2), ("give up", 1), ("begin", 1)]:
        hosts.do(move)
    for move in [("lose", 1), ("lose", 2)]:
        hosts.do(move)
        bring_all(3)
        hosts.check()
    assert hosts.begun == {1}
    assert hosts.is_over


def test_a_successor_counts_each_view_since_the_last_settled_one() -> None:
    """From the last alone four of twelve could go on, and seven others as well."""
    few = partial(has_majority, came={7, 8, 9, 10}, has_vote=False, has_witness=False)
    last = {0, 7, 8, 9, 10, 11}
    assert few([last])
    assert not few([{*range(12)}, last])
