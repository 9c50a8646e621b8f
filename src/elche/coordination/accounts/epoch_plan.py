"""Plans of an epoch: recorded as it runs, made from settings alone, or replayed.

A window's plan says which batches each rank trains on in it, after how many batches of
it the result of the window before is adopted, and how it is reduced. Under a plan
nothing depends on time, so two runs on the same devices give the same bits. Pure.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from elche.coordination.accounts.batch_ranges import WHOLE_BATCHES, BatchSizes, Range
from elche.errors import ConfigError

PLAN_VERSION = 2


@dataclass(slots=True, kw_only=True)
class WindowPlan:
    """One window; lists have an entry per rank.

    Attributes:
        parts: batches, as ranges in the order of training.
        adopt_at: batches of this window before which the last result is adopted.
        committed_samples: what a scheduler follows, as `OpenWindow` has it.
        planned_samples: likewise.
        planned_batches: likewise, per rank.
        reduction: settings of its `Reduce`; None for what the planner decides.
    """

    parts: list[list[Range]]
    adopt_at: list[int]
    committed_samples: int = 0
    planned_samples: int = 0
    planned_batches: list[int] = field(default_factory=list)
    reduction: dict[str, Any] | None = None

    def batches(self, rank: int) -> int:
        """Batches of a rank."""
        return sum(stop - start for start, stop in self.parts[rank])

    def to_text(self) -> str:
        """The window as JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


@dataclass(slots=True, kw_only=True)
class EpochPlan:
    """What an epoch did: its windows, or under ``sync`` its grants and shares.

    ``cut`` is how windows cut the batches of ``sizes``; empty under ``sync``, and in
    records of versions that did not cut them.
    """

    policy: str
    world_size: int
    sizes: list[tuple[int, int]]
    cut: list[int] = field(default_factory=list)
    windows: list[WindowPlan] = field(default_factory=list)
    steps: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def to_text(self, windows: Iterable[str] = ()) -> str:
        """The plan as JSON; these windows, of `WindowPlan.to_text`, come last."""
        texts = [*(window.to_text() for window in self.windows), *windows]
        names = [name for name in self.__slots__ if name != "windows"]
        plan = {name: getattr(self, name) for name in names}
        plan["version"] = PLAN_VERSION
        return f'{json.dumps(plan)[:-1]}, "windows": [{", ".join(texts)}]}}'

    @staticmethod
    def from_text(
        text: str, policy: str, world_size: int, sizes: BatchSizes
    ) -> EpochPlan:
        """Reads a plan.

        Raises:
            ConfigError: it is no plan, or one of another run.
        """
        try:
            raw = json.loads(text)
            version = raw.pop("version")
            windows = [WindowPlan(**window) for window in raw.pop("windows")]
            plan = EpochPlan(windows=windows, **raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"this is no recorded plan: {error!r}") from error
        found = (version, plan.policy, plan.world_size)
        if found != (PLAN_VERSION, policy, world_size):
            raise ConfigError(
                f"the recorded plan is of version {found[0]}, policy {found[1]!r} and "
                f"{found[2]} ranks, this run has version {PLAN_VERSION}, policy "
                f"{policy!r} and {world_size} ranks"
            )
        plan.sizes = [(size, count) for size, count in plan.sizes]
        plan.cut = plan.cut or list(WHOLE_BATCHES.to_wire())
        now = list(sizes.runs), list(sizes.cut.to_wire())
        if (plan.sizes, plan.cut) != now:
            raise ConfigError(
                "the record is of an epoch with batches of (size, count) "
                f"{plan.sizes}, this one has {now[0]}; or they are cut as {plan.cut}, "
                f"and here as {now[1]}; replay needs the same dataset length, "
                "batch_size, drop_last and local_batch_size"
            )
        try:
            for window in plan.windows:
                window.parts = [[(a, b) for a, b in part] for part in window.parts]
            plan.steps = [(a, b, list(shares)) for a, b, shares in plan.steps]
            problem = plan._problem(sizes)
        except (ValueError, TypeError) as error:
            problem = repr(error)
        if problem:
            raise ConfigError(
                f"this record is no division of its epoch: {problem}; replay a file "
                "as a run with record= wrote it"
            )
        return plan

    def _problem(self, sizes: BatchSizes) -> str:
        """What of the epoch is given out twice, to nobody, or to no such rank."""
        at = 0
        for start, stop, shares in self.steps:
            if not at == start < stop <= sizes.num_batches:
                return f"steps {start}..{stop - 1} after {at} of {sizes.num_batches}"
            (samples, end), at = sizes.run_of(start), stop
            is_split = len(shares) == self.world_size and min(shares) >= 0
            if not is_split or sum(shares) != samples or stop > end:
                return f"steps {start}..{stop - 1} of {samples} samples as {shares}"
        if self.policy == "sync" and at != sizes.num_batches:
            return f"{at} steps of {sizes.num_batches}"
        ranges = sorted(r for w in self.windows for part in w.parts for r in part)
        ends = [0, *(stop for _, stop in ranges)]
        for (start, stop), end in zip(ranges, ends, strict=False):
            if not end <= start < stop <= sizes.num_batches:
                return f"batches {start}..{stop - 1} after {end} of {sizes.num_batches}"
        for window in self.windows:
            if not len(window.parts) == len(window.adopt_at) == self.world_size:
                return f"a window of {len(window.parts)} ranks"
        return ""


class WindowSource(ABC):
    """Where planned windows come from."""

    @abstractmethod
    def window(self, number: int) -> WindowPlan | None:
        """The plan of the epoch's window ``number`` (from 0); None past its end."""


@final
class RecordedWindows(WindowSource):
    """Windows of a recorded epoch."""

    def __init__(self, plan: EpochPlan) -> None:
        self._windows = plan.windows

    def window(self, number: int) -> WindowPlan | None:
        """The recorded window ``number``; None past the epoch's end."""
        return self._windows[number] if number < len(self._windows) else None


@final
class FixedWindows(WindowSource):
    """Windows of fixed counts: what ``deterministic=True`` runs.

    Args:
        sizes: the epoch's batches.
        counts: batches per rank and window.
        committed_samples: of the run before this epoch.
    """

    def __init__(
        self, sizes: BatchSizes, counts: Sequence[int], committed_samples: int
    ) -> None:
        self._sizes = sizes
        self._counts = list(counts)
        self._committed_samples = committed_samples

    def window(self, number: int) -> WindowPlan | None:
        """Window ``number``, of the same counts as all; None past the epoch's end."""
        total, end = sum(self._counts), self._sizes.num_batches
        first = number * total
        if first >= end:
            return None
        parts: list[list[Range]] = []
        at = first
        for count in self._counts:
            stop = min(end, at + count)
            parts.append([(at, stop)] if stop > at else [])
            at = stop
        counts = [sum(b - a for a, b in part) for part in parts]
        return WindowPlan(
            parts=parts,
            adopt_at=[min(1, count) for count in counts],
            committed_samples=self._committed_samples
            + self._sizes.samples_in(0, first),
            planned_samples=self._sizes.samples_in(first, at),
            planned_batches=counts,
        )


class WindowPlans:
    """Plans of the windows of one epoch, by the numbers that they have in the run.

    Args:
        policy: its name.
        world_size: ranks of the epoch.
        sizes: its batches.
        first_window: the number of its first window.

    Attributes:
        unleased: the first window whose batches have not been leased by a plan.
    """

    def __init__(
        self, policy: str, world_size: int, sizes: BatchSizes, first_window: int
    ) -> None:
        self._first_window = self.unleased = first_window
        self._source: WindowSource | None = None
        self._recorded: list[str] = []
        self._record = EpochPlan(
            policy=policy,
            world_size=world_size,
            sizes=list(sizes.runs),
            cut=list(sizes.cut.to_wire()),
        )

    @property
    def is_followed(self) -> bool:
        """Whether windows are planned, and so depend on no measurement."""
        return self._source is not None

    def follow(self, source: WindowSource) -> None:
        """Plans the windows of this epoch."""
        self._source = source

    def window(self, window: int) -> WindowPlan | None:
        """The plan of a window; None past the end, or where none is followed."""
        if self._source is None:
            return None
        return self._source.window(window - self._first_window)

    def lease_next(self) -> WindowPlan | None:
        """The next window whose batches are to be leased; None past the end."""
        plan = self.window(self.unleased)
        self.unleased += plan is not None
        return plan

    def record(self, plan: WindowPlan) -> None:
        """Keeps what a window did."""
        self._recorded.append(plan.to_text())

    def to_text(self) -> str:
        """What the windows did, as JSON."""
        return self._record.to_text(self._recorded)
