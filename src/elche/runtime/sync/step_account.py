"""One rank's steps under ``sync``: its part of each, their costs, its reports."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, final

from elche.comm.gradients.part_weights import Lost, StepPart
from elche.comm.gradients.reducer import GradientReducer
from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.accounts.model_checks import EVERY_STEPS
from elche.coordination.protocol.instructions import GrantBatches
from elche.coordination.sync.step_reports import EARLY, StepReports
from elche.runtime.data.positions import EpochPositions
from elche.runtime.process.worker import Worker
from elche.runtime.sync.epoch_hooks import EpochHooks
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.nonfinite_watch import NonFiniteWatch


class Step(NamedTuple):
    """This rank's part of one global batch.

    A rank without samples gets some to run its loop body on (the same control flow, the
    same optimizer step), but has weight 0. ``part`` is this rank's own part: epoch,
    step, first sample and one past the last, or (). ``span`` numbers the parts of
    epochs over the whole run.
    """

    step: int
    samples: int
    shares: tuple[int, ...]
    part: tuple[int, ...] = ()
    span: int = 0

    def weighed(self, weight: float | None) -> StepPart:
        """This part with the weight of its gradients.

        Args:
            weight: weight by the user's function; None: its samples.
        """
        scale = self.samples / max(1, sum(self.shares))
        active = len(self.shares) - self.shares.count(0)
        return StepPart(scale, active, weight, label=self)

    def among(self, ranks: Sequence[int]) -> Step:
        """Returns the same step with the shares of these ranks only."""
        shares = tuple(n if r in ranks else 0 for r, n in enumerate(self.shares))
        return Step(self.step, self.samples, shares, self.part, self.span)

    def lost(self, number: int, *, gone: Mapping[int, int]) -> Lost:
        """Weight missing from a pass of this step.

        Args:
            number: number of the pass in the run.
            gone: ranks whose loop has left, with the passes that each has reached.
        """
        lost = [self.shares[rank] for rank, passes in gone.items() if passes < number]
        ranks, active = (sum(n > 0 for n in each) for each in (lost, self.shares))
        return Lost(sum(lost) / sum(self.shares), ranks / active)

    def is_same(self, other: Step | None) -> bool:
        """True if it is the same global batch."""
        return other is not None and (self.span, self.step) == (other.span, other.step)


def open_steps(reducer: GradientReducer, graphs: LiveGraph) -> list[Step]:
    """Steps whose backward pass is running or pending, oldest first."""
    parts = [reducer.part_under_way, *graphs.open_batches]
    if parts == [None]:  # between the steps of a plain loop
        return []
    steps = {part.label for part in parts if isinstance(part, StepPart)}
    found = [step for step in steps if not step.is_same(reducer.passed)]
    return sorted(found, key=lambda step: (step.span, step.step))


@final
class StepAccount(StepReports):
    """Measures steps, and reports each grant once the next step has begun.

    Attributes:
        reported: steps whose report is due or sent.
        is_early: steps were reported before their backward pass.
    """

    def __init__(
        self, worker: Worker, positions: EpochPositions, hooks: EpochHooks
    ) -> None:
        super().__init__(worker.rank, positions.epoch, hooks.numbers)
        self._worker = worker
        self._positions = positions
        self._hooks = hooks
        self._dead = hooks.steps.lost
        self._watch = NonFiniteWatch([], hooks.numbers)
        self._ran: deque[tuple[int, BatchCost, tuple[int, int]]] = deque()
        self._began_s = self._ready_s = self._transfer_s = 0.0
        self.reported = 0
        self.is_early = False
        place = worker.placement  # other devices, and emulation, hide reductions
        self._is_serial = place.device.type == "cpu" and place.emulation is None

    def watch(self, reducer: GradientReducer) -> None:
        """Checks this reducer's gradients for NaN and Inf from now on."""
        self._watch = NonFiniteWatch(reducer.parameters, self._hooks.numbers)
        reducer.look = partial(_look, self._watch, self._hooks.observer.graphs)

    def granted(self, grant: GrantBatches) -> None:
        """Records a grant of further steps."""
        if not self._dead.is_settled:
            super().granted(grant)

    def begin(self) -> None:
        """Starts timing the first step."""
        self._began_s = time.monotonic()

    def ready(self, transfer_s: float) -> None:
        """Records the arrival of the step's batch, and its transfer time (s)."""
        self._ready_s, self._transfer_s = time.monotonic(), transfer_s

    def _cost(self, step: Step, reducer: GradientReducer) -> BatchCost:
        """Measures the step until now, and starts timing the next one."""
        times_s = self._began_s, self._ready_s, time.monotonic()
        self._began_s = times_s[-1]
        batch = "step", step.step, *times_s, step.samples, reducer.wait_s
        self._worker.timeline.record(batch)
        is_warm, self._worker.is_cold = not self._worker.is_cold, False
        wait_s, moved_s = reducer.wait_s, self._transfer_s
        cost = BatchCost.measured(
            step.samples, times_s, moved_s, wait_s, is_timed=is_warm
        )
        cost.reduce_s = reducer.work_s if self._is_serial else 0.0
        return cost

    def step_ran(self, step: Step, reducer: GradientReducer) -> None:
        """Records that the loop has run a step; see :meth:`settle`."""
        passes = reducer.backward_passes, reducer.pass_steps
        slices, rest = divmod(step.step + 1, EVERY_STEPS)
        if not rest:
            self._hooks.sums.begin(step.step + 1, slices - 1)
        self._ran.append((step.step, self._cost(step, reducer), passes))

    def settle(self, first: int | None = None) -> bool:
        """Completes steps before ``first``; None: all, also with a pending pass.

        Returns:
            True if a report has become due, or was sent because the next one is.
        """
        has_changed = False
        while self._ran and (first is None or self._ran[0][0] < first):
            number, cost, passes = self._ran.popleft()
            if self.due is not None:  # there was no backward pass
                has_changed |= self.report()
            if not self._dead.first and self.step_done(number, cost):
                self._close(number, passes)
                has_changed = True
        return has_changed

    def _close(self, number: int, passes: tuple[int, int]) -> None:
        """Completes a grant, whose report waits for the next pass."""
        hooks, is_live = self._hooks, bool(self._hooks.observer.graphs.open_batches)
        is_last = number + 1 == self._positions.num_batches
        sends_norm = is_last and self._worker.place == 0
        self._watch.report(final=is_last)
        checks, self.reported = hooks.sums.take(self.reported), number + 1
        self.is_early |= is_live
        self.close(
            backward_passes=passes[0],
            pass_steps=passes[1],
            max_samples=self._worker.max_samples,
            parameter_norm=hooks.parameter_norm() if sends_norm else 0.0,
            scalars=hooks.observer.scalars.drain(final=is_last),
            unknown=EARLY if is_live else hooks.steps.unknown(),
            checks=checks,
        )

    def report(self) -> bool:
        """Sends the due report; returns True if there was one."""
        event = self.take()
        if event is not None:
            self._worker.send(event)
        return event is not None

    def leave(self, current: Step | None, reducer: GradientReducer, apart: str) -> None:
        """Sends `EpochLeft`: the loop has left in a step, or before the first.

        ``apart``: why this rank cannot take part in later passes, or "".
        """
        cost = None if current is None else self._cost(current, reducer)
        self._watch.report(final=True)
        checks, stepped = self._hooks.left_with()
        left = self.left(
            0 if current is None else current.step + 1,
            cost,
            self._hooks.observer.scalars.drain(final=True),
            passes=reducer.backward_passes,
            apart=apart,
            checks=checks,
            stepped=stepped,
        )
        self._worker.send(left)

    def void(self) -> None:
        """Discards unreported steps; the next group receives new grants."""
        super().void()
        self._ran.clear()


def _look(
    numbers: NonFiniteWatch, graphs: LiveGraph, step: Step, came: dict[int, int]
) -> None:
    """Checks a backward pass that is complete, before its gradients are reduced."""
    graphs.refuse_unseen()
    numbers.look(step.part, came)
