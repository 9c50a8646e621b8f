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
"""Causes of a rank's wait: its loader, a lease or grant, other ranks at a window's or
step's end, a reduction, the slowest rank, a new group, the start of runs and epochs, an
exclusion from steps.
"""

Key = tuple[int, int]


@dataclass(slots=True)
class RankHistory:
    """Sums over one rank's process; times in seconds.

    Attributes:
        rank: rank number.
        device: name of its kind of device.
        began_s: start time of its process.
        ended_s: time at which it ended or died, None while it runs.
        alive_s: time from its start to its death, or to the run's end; set by the
            report.
        has_died: whether it was killed.
        samples: number of this rank's samples that it trained.
        batches: number of trained batches.
        busy_s: compute time of the batches.
        load_s: loading time of the batches, overlapped or not.
        waits: waiting time by cause.
        copies_s: time of copying parameters for overlapped reductions.
        adoptions: number of averages adopted while a later window ran.
        lag_batches: sum of that window's batches before each adoption.
        most_lag_batches: the largest of these.
        lag_s: sum of the times from a window's end to its average's adoption.
        most_lag_s: the longest of these.
    """

    rank: int = 0
    device: str = ""
    began_s: float = 0.0
    ended_s: float | None = None
    alive_s: float = 0.0
    has_died: bool = False
    samples: int = 0
    batches: int = 0
    busy_s: float = 0.0
    load_s: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    copies_s: float = 0.0
    adoptions: int = 0
    lag_batches: int = 0
    most_lag_batches: int = 0
    lag_s: float = 0.0
    most_lag_s: float = 0.0


@dataclass(slots=True)
class Phase:
    """Part of the run under one policy, with the counts at its beginning.

    Attributes:
        policy: name of the policy.
        began_s: start time.
        samples: samples trained before it.
        windows: synchronisations before it.
        ranks: by rank, samples trained, adoptions and batches of lag before it.
    """

    policy: str
    began_s: float
    samples: int
    windows: int
    ranks: dict[int, tuple[int, int, int]]


@dataclass(slots=True)
class Recovery:
    """A membership change, and the time until ranks train again.

    Attributes:
        rank: rank that died or joined.
        at_s: time of the change.
        ranks: ranks that were alive then.
        recovered_s: by rank, the time at which it trained again.
    """

    rank: int
    at_s: float
    ranks: frozenset[int]
    recovered_s: dict[int, float] = field(default_factory=dict)


class History:
    """Record of a simulated run.

    Args:
        details: keep a timeline, and the positions that each rank trained.
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
        """Records a rank's wait."""
        if until_s <= since_s:
            return
        self.ranks[rank].waits[cause] += until_s - since_s
        if self.has_details:
            category = {DATA: DATA_WAIT, REDUCTION: SYNC}.get(cause, SYNC_WAIT)
            span = Span(rank, f"wait: {cause}", category, since_s, until_s - since_s)
            self.spans.append(span)

    def batch(self, rank: int, name: str, since_s: float, until_s: float) -> None:
        """Records a rank's computation."""
        if self.has_details:
            self.spans.append(Span(rank, name, BATCH, since_s, until_s - since_s))

    def changed(self, rank: int, now_s: float, alive: Iterable[int]) -> None:
        """Records that a rank has died or requested to join."""
        self.recoveries.append(Recovery(rank, now_s, frozenset(alive)))

    def note_recovery(self, rank: int, changed: Iterable[int], now_s: float) -> None:
        """Records that a rank trains again after these ranks died or joined."""
        for recovery in self.recoveries:
            if recovery.rank in changed:
                recovery.recovered_s.setdefault(rank, now_s)

    def begin_phase(self, policy: str, now_s: float) -> None:
        """Begins a phase if the policy has changed."""
        if not self.phases or self.phases[-1].policy != policy:
            self.phases.append(self.phase(policy, now_s))

    def phase(self, policy: str, now_s: float) -> Phase:
        """Returns a phase that begins now."""
        done = {
            rank: (sums.samples, sums.adoptions, sums.lag_batches)
            for rank, sums in self.ranks.items()
        }
        return Phase(policy, now_s, self.samples, self.windows, done)

    def count(self, key: Key, num_samples: int, parts: Iterable[Range]) -> None:
        """Counts trained positions of an epoch, each once even if it was repeated."""
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = bytearray(num_samples)
        for start, stop in parts:
            self.samples += seen.count(0, start, stop)
            seen[start:stop] = b"\1" * (stop - start)
