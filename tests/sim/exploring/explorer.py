"""All states that a small run can come to, by any order of what happens in it.

Messages to and from the core are under way for any time, ranks go on in any order, die
at any moment, with any of their last messages lost, and join at any moment. States are
told apart by what decides, and each is looked at once, those with the shortest way
first. A state of the whole is a few numbers: see `tests.sim.exploring.rank_states`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elche.coordination.protocol.events import Event, RankLost
from elche.coordination.protocol.instructions import BeginEpoch, Instruction
from tests.sim.exploring.frozen import Freezer
from tests.sim.exploring.rank_states import CoreStates, Facts, Parts, RankStates, Script

DEAD = -1
MOST_STATES = 1_000_000
"""More are a failure: the bound was wrong."""


class ViolationError(AssertionError):
    """Something that must hold does not; with the way there."""


class State(NamedTuple):
    """Of the whole run.

    Attributes:
        core: the number of the core's state.
        ranks: of each rank's; `DEAD` for those that have died.
        up: messages under way from each rank.
        down: instructions under way to each.
        net: the number of what ranks have sent each other.
        deaths: that may still come.
        joins: the same.
    """

    core: int
    ranks: tuple[int, ...]
    up: tuple[tuple[Event, ...], ...]
    down: tuple[tuple[Instruction, ...], ...]
    net: int
    deaths: int
    joins: int


class Nets:
    """What ranks have sent each other, each such state known by a number."""

    def __init__(self) -> None:
        self.met: list[Parts] = [{}]
        self._numbers: dict[frozenset[Any], int] = {frozenset(): 0}
        self._done: dict[Any, int] = {}

    def put(self, net: int, rank: int, new: dict[Any, Any]) -> int:
        """A rank has sent this to others."""
        if not new:
            return net
        met = dict(self.met[net])
        for key, value in new.items():
            met[key] = {**met.get(key, {}), rank: value}
        return self._number(met)

    def without(self, net: int, passed: int, generation: int) -> int:
        """What no rank will read any more is forgotten.

        Args:
            net: of which.
            passed: all have passed reductions up to this one.
            generation: all are in this one, or a later one.
        """
        asked = net, passed, generation
        if asked not in self._done:
            kept = {
                key: parts
                for key, parts in self.met[net].items()
                if not (
                    (key[0] == "sum" and key[2] <= passed)
                    or (key[0] == "form" and key[1] < generation)
                )
            }
            self._done[asked] = self._number(kept)
        return self._done[asked]

    def _number(self, met: Parts) -> int:
        frozen = frozenset(
            (key, rank, Freezer().freeze(value))
            for key, parts in met.items()
            for rank, value in parts.items()
        )
        number = self._numbers.setdefault(frozen, len(self.met))
        if number == len(self.met):
            self.met.append(met)
        return number


@dataclass
class Explored:
    """What an exploration has seen.

    Attributes:
        states: of the whole run.
        kinds: how often what happened.
        survivors: ranks that live, in each of the ends.
    """

    states: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    survivors: set[frozenset[int]] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What may happen, and how far is looked.

    Attributes:
        deaths: of ranks.
        joins: of newcomers, one after the other.
        is_delayed: messages are under way for any time; else they are there at once.
        loses: a rank that dies takes any number of its last messages with it.
    """

    deaths: int = 0
    joins: int = 0
    is_delayed: bool = True
    loses: bool = False


class Explorer:
    """Goes through all states of a run, those of a short way first.

    Args:
        script: of its ranks.
        bounds: of what may happen.
        check: asserts what must hold where the run is over, of the models of those
            who live and the number of positions.
    """

    def __init__(
        self,
        script: Script,
        bounds: Bounds,
        check: Callable[[Iterable[Any], int], None],
    ) -> None:
        self._bounds, self._check = bounds, check
        self._founders = script.cluster.world_size
        self._positions = sum(s * n for s, n in script.cluster.run.sizes)
        self._cores = CoreStates(self._founders)
        self._ranks = RankStates(script)
        self._nets = Nets()
        self._has_begun = False
        self._doing = ""

    def explore(self) -> Explored:
        """From the first epoch's beginning to all ends.

        Raises:
            ViolationError: an invariant does not hold, a state leads nowhere, or no end
                can be reached from one.
        """
        found, first = Explored(), self._begin()
        numbers, line = {first: 0}, deque([first])
        came: list[tuple[int, str]] = [(-1, "begin")]
        back: list[list[int]] = [[]]
        ends: list[int] = []
        while line:
            state = line.popleft()
            number, is_over = numbers[state], True
            try:
                for label, after in self._after(state):
                    is_over = False
                    kind = label.split()[0]
                    found.kinds[kind] = found.kinds.get(kind, 0) + 1
                    at = numbers.setdefault(after, len(came))
                    if at == len(came):
                        came.append((number, label))
                        back.append([])
                        line.append(after)
                        self._look_at(after)
                    back[at].append(number)
                if is_over:
                    self._end(state, found)
                    ends.append(number)
            except Exception as error:
                way = f"{_way(came, number)}\n{self._doing}"
                raise ViolationError(f"{error!r}\nafter:\n{way}") from error
            if len(came) > MOST_STATES:
                raise ViolationError(f"more than {len(came)} states")
        found.states = len(came)
        self._all_reach(ends, back, came)
        return found

    def _all_reach(
        self, ends: list[int], back: list[list[int]], came: list[tuple[int, str]]
    ) -> None:
        """Asserts that an end can be reached from each state."""
        reached, line = {*ends}, [*ends]
        while line:
            for before in back[line.pop()]:
                if before not in reached:
                    reached.add(before)
                    line.append(before)
        stuck = next((n for n in range(len(came)) if n not in reached), None)
        if stuck is not None:
            raise ViolationError(f"no end can be reached after:\n{_way(came, stuck)}")

    def _begin(self) -> State:
        """All ranks join and open the first epoch, in one order: none may die yet."""
        ranks = tuple(map(self._ranks.start, range(self._founders)))
        nothing = ((),) * self._founders
        core, bounds = self._cores.first, self._bounds
        now = State(core, ranks, nothing, nothing, 0, bounds.deaths, bounds.joins)
        while not self._has_begun:
            moves = self._after(now, is_begun=False)
            found = next((after for _, after in moves), None)
            assert found is not None, "the run does not begin"
            now = found
        return now

    def _after(
        self, state: State, *, is_begun: bool = True
    ) -> Iterator[tuple[str, State]]:
        """All that may happen next, in words, and what comes of it."""
        for rank, number in enumerate(state.ranks):
            if state.up[rank]:
                event = state.up[rank][0]
                self._doing = f"core hears {event}"
                after = state._replace(up=_with(state.up, rank, state.up[rank][1:]))
                yield f"core hears {event}", self._tidy(self._hear(after, event))
            if number == DEAD:
                continue
            self._doing = f"moves rank {rank}"
            if self._ranks.facts[number].is_over:
                continue
            read = state
            for count in range(len(state.down[rank]) + 1):
                read = self._read(read, rank) if count else state
                moved = self._move(read, rank)
                if moved != state:
                    label = f"moves rank {rank}, having read {count}"
                    yield label, self._tidy(moved)
        if is_begun:
            yield from self._deaths(state)
            if state.joins and not self._is_through(state):
                yield f"joins rank {len(state.ranks)}", self._join(state)

    def _is_through(self, state: State) -> bool:
        """Whether a rank of the start has ended in order."""
        facts = self._ranks.facts
        return any(n != DEAD and facts[n].is_over for n in state.ranks)

    def _deaths(self, state: State) -> Iterator[tuple[str, State]]:
        if not state.deaths:
            return
        facts = self._ranks.facts
        alive = [
            rank
            for rank, number in enumerate(state.ranks)
            if number != DEAD and not facts[number].is_over
        ]
        holders = [
            number
            for number in state.ranks
            if number != DEAD and facts[number].model is not None
        ]
        for rank in alive:
            if [state.ranks[rank]] == holders:
                continue  # nobody else holds the model
            sent = state.up[rank]
            for kept in range(0 if self._bounds.loses else len(sent), len(sent) + 1):
                after = state._replace(
                    deaths=state.deaths - 1,
                    ranks=_with(state.ranks, rank, DEAD),
                    up=_with(state.up, rank, sent[:kept]),
                    down=_with(state.down, rank, ()),
                )
                label = f"dies rank {rank}, {len(sent) - kept} messages lost"
                yield label, self._tidy(self._send(after, RankLost(rank=rank)))

    def _join(self, state: State) -> State:
        new = self._ranks.start(len(state.ranks))
        return state._replace(
            joins=state.joins - 1,
            ranks=(*state.ranks, new),
            up=(*state.up, ()),
            down=(*state.down, ()),
        )

    def _read(self, state: State, rank: int) -> State:
        """One message more is there; who does not move does not see it yet."""
        told, *rest = state.down[rank]
        after = self._ranks.receive(state.ranks[rank], told)
        down = _with(state.down, rank, tuple(rest))
        return state._replace(ranks=_with(state.ranks, rank, after), down=down)

    def _move(self, state: State, rank: int) -> State:
        met = self._nets.met[state.net]
        after, new, sent = self._ranks.move(state.ranks[rank], state.net, met)
        net = self._nets.put(state.net, rank, new)
        down = state.down
        if self._ranks.facts[after].is_over:
            down = _with(down, rank, ())
        ranks = _with(state.ranks, rank, after)
        state = state._replace(ranks=ranks, net=net, down=down)
        for event in sent:
            state = self._send(state, event)
        return state

    def _send(self, state: State, event: Event) -> State:
        """A message leaves for the core."""
        if not self._bounds.is_delayed:
            return self._hear(state, event)
        up = _with(state.up, event.rank, (*state.up[event.rank], event))
        return state._replace(up=up)

    def _hear(self, state: State, event: Event) -> State:
        """A message is there; the core's instructions leave."""
        core, told = self._cores.handle(state.core, event)
        ranks, down = [*state.ranks], [*state.down]
        for one in told:
            self._has_begun |= isinstance(one, BeginEpoch)
            at = ranks[one.rank] if one.rank < len(ranks) else DEAD
            if at == DEAD or self._ranks.facts[at].is_over:
                continue
            if self._bounds.is_delayed:
                down[one.rank] = (*down[one.rank], one)
            else:
                ranks[one.rank] = self._ranks.receive(at, one)
        return state._replace(core=core, ranks=tuple(ranks), down=tuple(down))

    def _tidy(self, state: State) -> State:
        """Forgets what no rank will read."""
        held = [f for f in self._living(state) if f.model is not None]
        reading = [facts for facts in held if not facts.is_over]
        if not reading:
            return state
        passed = min(facts.passed for facts in reading)
        generation = min(facts.generation for facts in reading)
        return state._replace(net=self._nets.without(state.net, passed, generation))

    def _living(self, state: State) -> list[Facts]:
        return [self._ranks.facts[n] for n in state.ranks if n != DEAD]

    def _look_at(self, state: State) -> None:
        """Asserts that those who live agree: one model, or two and one came of it."""
        held = {facts.model for facts in self._living(state)} - {None}
        models = sorted(held, key=len)  # type: ignore[arg-type]
        assert len(models) <= 2, f"ranks hold {models}"
        assert len(models) < 2 or set(models[0]) < set(models[1]), models  # type: ignore[call-overload]

    def _end(self, state: State, found: Explored) -> None:
        """Nothing can happen: all have ended, and hold what they should."""
        waiting = [
            rank
            for rank, number in enumerate(state.ranks)
            if number != DEAD and not self._ranks.facts[number].is_over
        ]
        doing = self._cores.core(state.core).doing
        assert not waiting, f"ranks {waiting} wait for ever; the core: {doing}"
        models = [facts.model for facts in self._living(state)]
        self._check([model for model in models if model is not None], self._positions)
        ranks = enumerate(state.ranks)
        found.survivors.add(frozenset(rank for rank, number in ranks if number != DEAD))


def _way(came: list[tuple[int, str]], number: int) -> str:
    labels = []
    while number >= 0:
        number, label = came[number]
        labels.append(label)
    return "\n".join(reversed(labels))


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])
