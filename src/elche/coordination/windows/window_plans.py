"""Plans of an epoch's windows: the one followed, if any, and the one recorded. Pure."""

from __future__ import annotations

from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.epoch_plan import EpochPlan, WindowPlan, WindowSource


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
