"""Play a story and describe its outcome in three layers.

- ends and epochs: how each rank ends, and how often each position is in the model.
- efficiency: hardware efficiency of the run.
- commits: positions that came into the model, by window or step and by rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby
from operator import itemgetter

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.sim.report import report_of
from elche.sim.simulation import Simulation
from tests.sim.books import Books, Model, Part
from tests.sim.checks import CHECKED
from tests.sim.golden.stories import Story
from tests.sim.test_cuts import CutSimulation
from tests.sim.watched import WatchedSimulation

FINISHED, DIED, ABORTED, TURNED_AWAY = "F", "D", "A", "T"
HASH_DIGITS = 12

Commit = tuple[str, int, int, int, int, int]
"""("window" or "step", its number, epoch, rank, first position, one past the last)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Recorded values of a story.

    Attributes:
        ends: a letter per rank: finished, died, aborted or turned away.
        epochs: of each run and epoch, how often its positions are in the model:
            "once", or "some" where a loop left or the run was aborted.
        efficiency: hardware efficiency; None where the run was aborted.
        commits: hash of :func:`commits_of`, their number, and the number of parts of a
            first epoch that was cut.
    """

    ends: str
    epochs: tuple[str, ...]
    efficiency: float | None
    commits: str


@cache
def outcome(story: Story) -> Outcome:
    """Plays a story and describes it."""
    sim = play(story)
    commits, ends = commits_of(sim), ends_of(sim)
    digest = hashlib.sha256(repr(commits).encode()).hexdigest()[:HASH_DIGITS]
    ends_told = sim.ends[0] if isinstance(sim, CutSimulation) else []
    cuts = [end for end in ends_told if not end.epoch]
    return Outcome(
        ends=ends,
        epochs=tuple(epochs_of(sim)),
        efficiency=round(report_of(sim).efficiency, 4) if FINISHED in ends else None,
        commits=f"{digest} {len(commits)}" + f" in {len(cuts)} parts" * bool(cuts),
    )


def play(story: Story) -> CutSimulation | WatchedSimulation:
    """Simulates a story with every check on.

    The books of `tests.sim.books` are kept and compared at every epoch's end: a lost or
    doubled position raises here.
    """
    sim: CutSimulation | WatchedSimulation
    if story.cuts:
        assert not story.deaths
        sim = CutSimulation(story.cluster, story.cuts)
    else:
        sim = WatchedSimulation(story.cluster, CHECKED, story.deaths)
    sim.run()
    return sim


def ends_of(sim: Simulation) -> str:
    """How each rank ended, in rank order."""

    def end(rank: int) -> str:
        if sim.history.ranks[rank].has_died:
            return DIED
        if rank in sim.history.finished:
            return FINISHED
        return TURNED_AWAY if sim.is_rejected(rank) else ABORTED

    return "".join(map(end, sorted(sim.history.ranks)))


def epochs_of(sim: Simulation) -> Iterator[str]:
    """How often the positions of each epoch are in the model that survives."""
    sizes = BatchSizes(sim.cluster.run.sizes)
    for run in range(sim.cluster.run.runs):
        parts = [*_model_parts(sim, run), *_books(sim, run).discarded.elements()]
        for epoch in range(sim.cluster.run.epochs):
            counts = Counter(
                position
                for of, start, stop in parts
                for position in range(start, stop)
                if of == epoch
            )
            assert set(counts.values()) <= {1}, f"epoch {epoch}: {counts}"
            yield "once" if len(counts) == sizes.num_samples else "some"


def commits_of(sim: Simulation) -> list[Commit]:
    """Positions that came into the model, in the order of its windows and steps.

    A position is committed by the rank that trained on it last: it is trained on again
    only where the contribution before was lost.
    """
    found: list[Commit] = []
    for run in range(sim.cluster.run.runs):
        owners = _owners(sim, run)
        for kind, number, held in _rounds(sim, run):
            places = sorted((e, at) for e, a, b in held for at in range(a, b))
            rows = [(e, owners[e][at], at - n, at) for n, (e, at) in enumerate(places)]
            for (epoch, rank, _), group in groupby(rows, key=itemgetter(0, 1, 2)):
                ats = [at for *_, at in group]
                found.append((kind, number, epoch, rank, ats[0], ats[-1] + 1))
    runs = range(sim.cluster.run.runs)
    parts = [part for run in runs for part in _model_parts(sim, run)]
    assert sum(b - a for *_, a, b in found) == sum(b - a for _, a, b in parts)
    return found


def _owners(sim: Simulation, run: int) -> list[list[int]]:
    """Per epoch and position the rank that trained on it last."""
    sizes, epochs = BatchSizes(sim.cluster.run.sizes), sim.cluster.run.epochs
    owners = [[-1] * sizes.num_samples for _ in range(epochs)]
    for epoch in range(epochs):
        for rank, start, stop in sim.history.trained[run, epoch]:
            owners[epoch][start:stop] = [rank] * (stop - start)
    return owners


def _rounds(sim: Simulation, run: int) -> Iterator[tuple[str, int, list[Part]]]:
    """Steps, then windows, of the model that survives, each with its parts."""
    books, model = _books(sim, run), _survivor(sim, run)
    for number, step in enumerate(model.steps):
        yield "step", number, list(step)
    before: Counter[Part] = Counter()
    for window, common in zip(books.windows, books.commons, strict=True):
        if not before - common:  # built on that one; a redone reduction has no heirs
            yield "window", window, list((common - before).elements())
            before = common


def _model_parts(sim: Simulation, run: int) -> list[Part]:
    """All that is in the model that survives."""
    model = _survivor(sim, run)
    common = _books(sim, run).commons[model.common]
    return [*common.elements(), *chain(*model.steps)]


def _books(sim: Simulation, run: int) -> Books:
    return sim.books[run]


def _survivor(sim: Simulation, run: int) -> Model:
    """The model of the lowest rank that finished, else the one that came furthest."""
    models = [*map(_books(sim, run).model, range(len(sim.history.ranks)))]
    if finished := sorted(sim.history.finished):
        return models[finished[0]]
    return max(models, key=lambda model: (len(model.steps), model.common))
