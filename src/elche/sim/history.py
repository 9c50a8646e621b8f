"""History of a simulated run: sums always, details on request. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from elche.coordination.accounts.batch_ranges import Range
from elche.coordination.protocol.instructions import Abort, PolicyChosen
from elche.monitor.trace import BATCH, DATA_WAIT, SYNC, SYNC_WAIT, Span

DATA = "data"
LEASE = "lease"
WINDOW_END = "window end"
REDUCTION = "reduction"
THROTTLE = "throttle"
REGROUP = "regroup"
START = "start"
LEFT_OUT = "left out"
CAUSES = (DATA, LEASE, WINDOW_END, REDUCTION, THROTTLE, REGROUP, START, LEFT_OUT)
"""Causes of a rank's wait: its loader, a lease or grant, other ranks that end a window
or step, a reduction, the slowest rank, a new group, the begin of runs and epochs,
its readmission to steps.
"""

Key = tuple[int, int]


@dataclass(slots=True)
class RankHistory:
    """Sums of one rank.

    Attributes:
        device: the name of its kind.
        began_s: when its process started.
        ended_s: when it ended or died, None while it runs.
        has_died: whether it was killed.
        samples: trained on, its own ones.
        batches: trained on.
        compute_s: of them.
        load_s: loading time of them, overlapped or not.
        waits_s: by cause.
        copies_s: copying parameters for overlapped reductions.
        adoptions: averages adopted while a further window ran.
        lag_batches: of that window, run before the adoption; their sum ...
        most_lag_batches: ... and the most of any.
        lag_s: seconds from a window's end to the adoption of its average, their sum ...
        most_lag_s: ... and the most of any.
    """

    device: str = ""
    began_s: float = 0.0
    ended_s: float | None = None
    has_died: bool = False
    samples: int = 0
    batches: int = 0
    compute_s: float = 0.0
    load_s: float = 0.0
    waits_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    copies_s: float = 0.0
    adoptions: int = 0
    lag_batches: int = 0
    most_lag_batches: int = 0
    lag_s: float = 0.0
    most_lag_s: float = 0.0


@dataclass(slots=True)
class Phase:
    """A part of the run under one policy, as what had been done when it began.

    Attributes:
        policy: its name.
        began_s: when.
        samples: trained on before it.
        windows: synchronisations before it.
        ranks: of each rank, samples trained on, adoptions and batches of lag before it.
    """

    policy: str
    began_s: float
    samples: int
    windows: int
    ranks: dict[int, tuple[int, int, int]]


@dataclass(slots=True)
class Recovery:
    """One change of membership, and the time that it cost.

    Attributes:
        rank: who died or joined.
        at_s: when.
        ranks: who was alive then.
        going: of them, who trains again, and since when.
    """

    rank: int
    at_s: float
    ranks: frozenset[int]
    going: dict[int, float] = field(default_factory=dict)


class History:
    """Record of a simulated run.

    Args:
        details: keep a timeline, and who trained on what.
    """

    def __init__(self, *, details: bool) -> None:
        self.has_details = details
        self.spans: list[Span] = []
        self.ranks: dict[int, RankHistory] = {}
        self.aborts: dict[int, Abort] = {}
        self.finished: set[int] = set()
        self.recoveries: list[Recovery] = []
        self.windows = 0
        self.samples = 0
        self.phases: list[Phase] = []
        self.choices: list[tuple[float, PolicyChosen]] = []
        self._seen: dict[Key, bytearray] = {}
        self.trained: dict[Key, list[tuple[int, int, int]]] = defaultdict(list)
        self.committed: dict[Key, frozenset[int]] = {}
        self.ended: dict[Key, set[int]] = defaultdict(set)

    def wait(self, rank: int, cause: str, since_s: float, until_s: float) -> None:
        """A rank has waited."""
        if until_s <= since_s:
            return
        self.ranks[rank].waits_s[cause] += until_s - since_s
        if self.has_details:
            category = {DATA: DATA_WAIT, REDUCTION: SYNC}.get(cause, SYNC_WAIT)
            span = Span(rank, f"wait: {cause}", category, since_s, until_s - since_s)
            self.spans.append(span)

    def batch(self, rank: int, name: str, since_s: float, until_s: float) -> None:
        """A rank has computed."""
        if self.has_details:
            self.spans.append(Span(rank, name, BATCH, since_s, until_s - since_s))

    def changed(self, rank: int, now_s: float, alive: Iterable[int]) -> None:
        """A rank has died or asked to join."""
        self.recoveries.append(Recovery(rank, now_s, frozenset(alive)))

    def going_again(self, rank: int, changed: Iterable[int], now_s: float) -> None:
        """A rank goes on after these ranks have died or joined."""
        for recovery in self.recoveries:
            if recovery.rank in changed:
                recovery.going.setdefault(rank, now_s)

    def begin_phase(self, policy: str, now_s: float) -> None:
        """From here on the run is under this policy, if it was not before."""
        if not self.phases or self.phases[-1].policy != policy:
            self.phases.append(self.phase(policy, now_s))

    def phase(self, policy: str, now_s: float) -> Phase:
        """A phase that begins now."""
        done = {
            rank: (sums.samples, sums.adoptions, sums.lag_batches)
            for rank, sums in self.ranks.items()
        }
        return Phase(policy, now_s, self.samples, self.windows, done)

    def count(self, key: Key, num_samples: int, parts: Iterable[Range]) -> None:
        """Counts an epoch's positions once, however often they were trained on."""
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = bytearray(num_samples)
        for start, stop in parts:
            self.samples += seen.count(0, start, stop)
            seen[start:stop] = b"\1" * (stop - start)
