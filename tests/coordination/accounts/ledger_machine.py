"""An epoch's ledger and its model, moved together by hypothesis."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.ledger import EpochLedger
from tests.harness.reached import reach

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=30).map(BatchSizes.of)
POOL, COMMITTED, LEFT_OUT = "pool", "committed", "left out"


class LedgerMachine(RuleBasedStateMachine):
    """Every legal move of an epoch's ledger, beside a model of one entry per batch."""

    @initialize(sizes=SIZES, holders=st.integers(1, 3))
    def begin(self, sizes: BatchSizes, holders: int) -> None:
        self._begin(sizes, holders)

    @precondition(lambda self: self.ledger.is_done)
    @rule(holders=st.integers(1, 3))
    def begin_again(self, holders: int) -> None:
        self._begin(self.sizes, holders)
        reach("epochs that were done")

    def _begin(self, sizes: BatchSizes, holders: int) -> None:
        self.sizes = sizes
        self.ledger = EpochLedger(sizes, range(holders))
        self.holders = list(range(holders))
        self.gone: set[int] = set()
        self.where: list[str | tuple[str, int]] = [POOL] * sizes.num_batches
        self.leases: dict[int, list[int]] = {holder: [] for holder in self.holders}

    def at(self, place: str | tuple[str, int]) -> list[int]:
        return [batch for batch, at in enumerate(self.where) if at == place]

    def at_any(self, kind: str) -> list[int]:
        return [batch for batch, at in enumerate(self.where) if at[0] == kind]

    def move(self, batches: Iterable[int], place: str | tuple[str, int]) -> None:
        for batch in batches:
            self.where[batch] = place

    def samples(self, batches: Iterable[int]) -> int:
        return sum(self.sizes.run_of(batch)[0] for batch in batches)

    def holder(self, data: st.DataObject, kind: str = "") -> int:
        """One that is there, and has batches of a kind."""
        has = [h for h in self.holders if not kind or self.at((kind, h))]
        return data.draw(st.sampled_from(has))

    def part_of(self, data: st.DataObject, batches: list[int]) -> tuple[int, int]:
        """Some of these batches that follow each other."""
        start = data.draw(st.sampled_from(batches))
        stop = data.draw(st.integers(start + 1, start + run_length(batches, start)))
        return start, stop

    # Moves of an epoch in which nothing goes wrong.

    @precondition(lambda self: POOL in self.where and not self.at_any("staged"))
    @rule(most=st.integers(1, 4), equal_sizes=st.booleans())
    def window(self, most: int, equal_sizes: bool) -> None:
        """One as a whole, up to its reduction: few draws come to that by chance."""
        for holder in self.holders:
            if POOL in self.where:
                self.lease_next(holder, most, equal_sizes)
            while self.leases[holder]:
                self.train_next(holder, 1)
            self.close_all(holder)
        if self.at_any("closed"):
            self.stage()

    @precondition(lambda self: POOL in self.where)
    @rule(data=st.data(), most=st.integers(1, 4), equal_sizes=st.booleans())
    def lease(self, data: st.DataObject, most: int, equal_sizes: bool) -> None:
        self.lease_next(self.holder(data), most, equal_sizes)

    def lease_next(self, holder: int, most: int, equal_sizes: bool) -> None:
        pooled = self.at(POOL)
        start = pooled[0]
        stop = start + min(most, run_length(pooled, start))
        if equal_sizes:
            stop = min(stop, self.sizes.run_of(start)[1])
        given = self.ledger.lease(holder, most, equal_sizes=equal_sizes)
        assert given == (start, stop)
        self.granted(holder, start, stop)

    @precondition(lambda self: POOL in self.where)
    @rule(data=st.data())
    def lease_range(self, data: st.DataObject) -> None:
        holder = self.holder(data)
        start, stop = self.part_of(data, self.at(POOL))
        self.ledger.lease_range(holder, start, stop)
        self.granted(holder, start, stop)

    def granted(self, holder: int, start: int, stop: int) -> None:
        self.move(range(start, stop), ("leased", holder))
        self.leases[holder] += range(start, stop)

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        holder = self.holder(data, "leased")
        held = self.leases[holder]
        ahead = next((n for n, b in enumerate(held) if b != held[0] + n), len(held))
        self.train_next(holder, data.draw(st.integers(1, ahead)))

    def train_next(self, holder: int, count: int) -> None:
        held = self.leases[holder]
        self.ledger.train(holder, held[0], held[0] + count)
        self.move(held[:count], ("trained", holder))
        del held[:count]

    @precondition(lambda self: self.at_any("trained"))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.close_all(self.holder(data, "trained"))

    def close_all(self, holder: int) -> None:
        self.ledger.close(holder)
        self.move(self.at(("trained", holder)), ("closed", holder))

    @precondition(lambda self: self.at_any("closed") and not self.at_any("staged"))
    @rule()
    def stage(self) -> None:
        staged = self.at_any("closed")
        assert self.ledger.stage() == self.samples(staged)
        for batch in staged:
            self.where[batch] = ("staged", self.where[batch][1])

    @precondition(lambda self: self.at_any("staged"))
    @rule()
    def commit(self) -> None:
        staged = self.at_any("staged")
        self.ledger.commit()
        self.move(staged, COMMITTED)
        reach("commits")
        reach("commits of what a dead rank had", len(self.gone))
        self.gone.clear()

    # Moves of one in which ranks come, go and give back.

    @precondition(lambda self: self.gone)
    @rule()
    def redo(self) -> None:
        lost = {h: self.samples(self.at(("staged", h))) for h in self.gone}
        assert self.ledger.unstage_gone() == lost
        for holder in self.gone:
            self.move(self.at(("staged", holder)), POOL)
        self.gone.clear()
        reach("redone reductions")

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        holder = self.holder(data, "leased")
        back = self.at(("leased", holder))
        assert self.ledger.give_back(holder) == len(back)
        self.move(back, POOL)
        self.leases[holder].clear()
        reach("leases given back")

    @precondition(lambda self: len(self.holders) > 1 and self.is_under_way())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        holder = self.holder(data)
        self.holders.remove(holder)
        self.ledger.remove(holder)
        del self.leases[holder]
        for kind in ("leased", "trained", "closed"):
            self.move(self.at((kind, holder)), POOL)
        if self.at(("staged", holder)):
            self.gone.add(holder)
            reach("deaths in a reduction")
        reach("deaths")

    @precondition(lambda self: self.has_closed())
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        holder = self.holder(data, "closed")
        closed = self.at(("closed", holder))
        self.ledger.discard(holder)
        self.move(closed, LEFT_OUT)
        reach("discarded updates")

    @precondition(lambda self: POOL in self.where and self.at_any("staged"))
    @rule()
    def abandon(self) -> None:
        pooled = self.at(POOL)
        assert self.ledger.abandon() == len(pooled)
        self.move(pooled, LEFT_OUT)
        reach("epochs left early")

    # Conditions, and what holds at all times.

    def is_under_way(self) -> bool:
        return any(self.at_any(k) for k in ("leased", "trained", "closed", "staged"))

    def has_closed(self) -> bool:
        return any(self.at(("closed", holder)) for holder in self.holders)

    @invariant()
    def agrees(self) -> None:
        ledger = self.ledger
        ledger.check()
        pooled = [b for part in ledger._pool for b in range(*part)]
        assert pooled == self.at(POOL)
        assert ledger.pooled == len(pooled)
        assert ledger.total_leased == sum(map(len, self.leases.values()))
        for holder in self.holders:
            assert ledger.leased(holder) == len(self.leases[holder])
            assert ledger.trained(holder) == len(self.at(("trained", holder)))
        committed, staged = self.at(COMMITTED), self.at_any("staged")
        waiting = [*self.at_any("trained"), *self.at_any("closed"), *staged]
        assert ledger.used_samples == self.samples([*committed, *waiting])
        assert ledger.is_done == set(self.where).issubset((COMMITTED, LEFT_OUT))


def run_length(batches: list[int], start: int) -> int:
    """How many of these batches follow each other from one on."""
    there = set(batches)
    stop = start
    while stop in there:
        stop += 1
    return stop - start
