"""An epoch under ``sync``, as one rank runs it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elche.comm.reducer import GradientReducer
from elche.coordination.messages import (
    EndEpoch,
    EpochLeft,
    GrantSteps,
    Instruction,
    StepsDone,
    SwitchPolicy,
)
from elche.errors import CommunicationError, ProtocolError
from elche.runtime.leased_batches import LeasedBatches
from elche.runtime.positions import EpochPositions
from elche.runtime.summed_loss import SummedReducer
from elche.runtime.window_epoch import EpochHooks
from elche.runtime.worker import Worker


@dataclass(frozen=True, slots=True)
class Step:
    """This rank's part of one global batch.

    A rank without samples gets some to run its loop body on (the same control flow, the
    same optimizer step), but weighs nothing.
    """

    step: int
    samples: int
    scale: float
    active_ranks: int


@dataclass(slots=True)
class _Measured:
    """What a grant's steps cost so far."""

    samples: int = 0
    busy_s: float = 0.0
    data_wait_s: float = 0.0
    transfer_s: float = 0.0
    sync_wait_s: float = 0.0
    warm: bool = True


class SyncEpoch:
    """Hands out this rank's share of every global batch.

    Ends early, with ``switch`` set, where windows take over (``auto``); instructions
    that came after that are ``later``.

    Args:
        worker: this rank's shell.
        batches: the leased stream of batches.
        positions: the epoch.
        reducer: reduces gradients during backward.
        min_share_samples: least samples that the model can train on.
        hooks: where metrics go, and what is checked at every step.
    """

    def __init__(
        self,
        worker: Worker,
        batches: LeasedBatches,
        positions: EpochPositions,
        reducer: GradientReducer | SummedReducer,
        min_share_samples: int,
        hooks: EpochHooks,
    ) -> None:
        self._worker = worker
        self._leased = batches
        self._positions = positions
        self._reducer = reducer
        self._min_share_samples = min_share_samples
        self._hooks = hooks
        self._grants: deque[GrantSteps] = deque()
        self._granted_until = 0
        self._measured = _Measured()
        self._unsent: StepsDone | None = None
        self.end: EndEpoch | None = None
        self.switch: SwitchPolicy | None = None
        self.later: list[Instruction] = []
        self.samples_done = 0
        self.samples_in_hand = 0

    def refill(self) -> None:
        """Reads grants that have come; called when the loader draws."""
        self._worker.take_all(self.handle)

    def batches(self) -> Iterator[Any]:
        """Yields this rank's batches; a break ends the epoch."""
        handed_out = 0
        try:
            for step, data in self._steps():
                handed_out = step.step + 1
                self.samples_in_hand = step.samples
                yield data
        except GeneratorExit:
            with contextlib.suppress(CommunicationError):
                self._reducer.end_step()
            self._report()
            if handed_out:
                self.samples_done += self._positions.samples_of(handed_out - 1)
            epoch = self._positions.epoch
            self._worker.send(
                EpochLeft(rank=self._worker.rank, epoch=epoch, step=handed_out)
            )

    def _steps(self) -> Iterator[tuple[Step, Any]]:
        began_s = time.monotonic()
        for number in range(self._positions.num_batches):
            got = self._next(number)
            if got is None:
                return
            step, data = got
            ready_s = time.monotonic()
            transfer_s = self._leased.transfer_s
            self._hooks.check()
            self._reducer.begin_step(step.scale, step.active_ranks)
            self._worker.span("data wait", "data wait", began_s, ready_s)
            yield step, data
            self._reducer.end_step()
            self._worker.pace_device()
            self._worker.span(f"step {number}", "batch", ready_s, samples=step.samples)
            now_s = time.monotonic()
            self._measured.transfer_s += transfer_s
            self._account(step, now_s - began_s, ready_s - began_s - transfer_s)
            began_s = now_s
        self._report()
        while self.end is None:
            self._worker.receive(self.handle, "the end of the epoch")

    def _next(self, number: int) -> tuple[Step, Any] | None:
        """The next batch; waits only if its grant has not come. None: see `switch`."""
        while self.switch is None or number < self.switch.step:
            got = self._leased.take()
            if got is not None:
                if got[0].step != number:
                    raise ProtocolError(f"expected step {number}, loaded {got[0]}")
                return got
            self._report()
            waits = self._granted_until <= number and not self._leased.has_work
            if waits and self.switch is None:  # drawing may have brought it
                self._worker.receive(self.handle, f"the grant of step {number}")
        self._report()
        return None

    def handle(self, instruction: Instruction) -> None:
        """Takes a grant, or the end of the epoch."""
        if self.switch is not None:
            self.later.append(instruction)
            return
        if isinstance(instruction, SwitchPolicy):
            self.switch = instruction
            return
        if isinstance(instruction, EndEpoch):
            self.end = instruction
            return
        if not isinstance(instruction, GrantSteps):
            raise ProtocolError(f"unexpected in an epoch of sync: {instruction!r}")
        self._grants.append(instruction)
        shares, rank = instruction.shares, self._worker.rank
        start, samples = sum(shares[:rank]), shares[rank]
        total = sum(shares)
        active = sum(share > 0 for share in shares)
        for number in range(instruction.start, instruction.stop):
            step = Step(number, samples, samples / total, active)
            if samples:
                batch = self._positions.index_batch(number, start, start + samples)
            else:
                few = min(self._min_share_samples, total)
                batch = self._positions.index_batch(number, 0, few)
            self._leased.push(step, batch)
        self._granted_until = instruction.stop
        if self._granted_until == self._positions.num_batches:
            self._leased.end()

    def _report(self) -> None:
        """Sends what is still to be said."""
        event, self._unsent = self._unsent, None
        if event is not None:
            self._reducer.run_beneath(None)
            self._worker.send(event)

    def _report_beneath(self) -> None:
        """The same inside a backward pass; reads what came since the last report."""
        self._report()
        self.refill()

    def _account(self, step: Step, step_s: float, data_wait_s: float) -> None:
        self._report()  # there was no backward pass
        measured = self._measured
        sync_wait_s = self._reducer.wait_s
        measured.samples += step.samples
        measured.busy_s += step_s - sync_wait_s
        measured.data_wait_s += max(0.0, data_wait_s)
        measured.sync_wait_s += sync_wait_s
        measured.warm &= not self._worker.is_cold
        self._worker.is_cold = False
        self.samples_done += self._positions.samples_of(step.step)
        if self._grants and step.step + 1 == self._grants[0].stop:
            grant = self._grants.popleft()
            is_last = grant.stop == self._positions.num_batches
            tells_norm = is_last and self._worker.rank == 0
            self._unsent = StepsDone(
                rank=self._worker.rank,
                epoch=self._positions.epoch,
                start=grant.start,
                stop=grant.stop,
                samples=measured.samples,
                busy_s=measured.busy_s,
                data_wait_s=measured.data_wait_s,
                sync_wait_s=measured.sync_wait_s,
                warm=measured.warm,
                backward_passes=self._reducer.backward_passes,
                max_samples=self._worker.max_samples,
                transfer_s=measured.transfer_s,
                parameter_norm=self._hooks.parameter_norm() if tells_norm else 0.0,
                scalars=self._hooks.scalars(is_last),
            )
            self._measured = _Measured()
            self._reducer.run_beneath(self._report_beneath)
