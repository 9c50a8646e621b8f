"""What one rank does in a simulated run: the real worker's loops as generators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from elche.cadence.throughput import CostEstimate
from elche.cadence.window import should_close
from elche.config import RunConfig
from elche.coordination.agreement import Settings
from elche.coordination.ledger import BatchSizes
from elche.coordination.messages import (
    PROTOCOL_VERSION,
    BatchDone,
    BeginEpoch,
    CloseWindow,
    EndEpoch,
    EpochLeft,
    EpochOpened,
    GrantBatches,
    GrantSteps,
    Instruction,
    Join,
    Left,
    OpenWindow,
    Reduce,
    StepsDone,
    Welcome,
    WindowClosed,
    WindowReduced,
)
from tests.coordination.simulated import (
    Meet,
    Plan,
    Receive,
    Record,
    Script,
    Simulation,
    Sleep,
    Worker,
)

Step = tuple[int, int, int, int]
"""(step, first sample, one past the last, samples that count)."""


def join_of(plan: Plan, rank: int, **changes: Any) -> Join:
    """How a rank presents itself."""
    config = RunConfig(policy=plan.policy, **plan.config)
    settings = Settings(
        config=config.as_dict(),
        loader={"batches": plan.num_batches},
        optimizer={"lr": 0.1},
        min_share_samples=plan.min_share_samples,
        epochs=plan.epochs,
    )
    fields: dict[str, Any] = {
        "rank": rank,
        "version": PROTOCOL_VERSION,
        "world_size": plan.world_size,
        "settings": settings.as_pairs(),
        "tensors": (("weight", "[3, 4]", "float32"),),
        "device": "CPU",
        "horizon_batches": plan.devices[rank].horizon_batches,
    }
    return Join(**(fields | changes))


def script(sim: Simulation, rank: int) -> Script:
    """A rank's whole life."""
    yield Sleep(0.0)
    for run in range(sim.plan.runs):
        yield from Rank(sim, rank, run).live()


def simulate(plan: Plan) -> Record:
    """Runs a plan with workers that behave."""
    return Simulation(plan, script).run()


class Feed:
    """`BatchFeed` over a DataLoader with so many batches prefetched."""

    def __init__(self, rank: Rank, epoch: int, refill: Callable[[], Script]) -> None:
        self._rank = rank
        self._empty = rank.record.empty_draws[rank.run, epoch]
        self._refill = refill
        self._drawn: deque[Any] = deque()
        self._started = self._stopped = False
        self.queued: deque[Any] = deque()
        self.ended = False

    def next(self) -> Generator[Any, None, Any]:
        """The next loaded item, None where an empty batch was drawn."""
        if not self._started:
            self._started = True
            for _ in range(self._rank.device.prefetched):
                yield from self._draw()
        yield from self._draw()
        return self._drawn.popleft() if self._drawn else None

    def discard(self) -> None:
        self.queued.clear()
        self._drawn = deque(None for _ in self._drawn)

    @property
    def holds_any(self) -> bool:
        return bool(self.queued) or any(item is not None for item in self._drawn)

    def _draw(self) -> Script:
        if self._stopped:
            return
        if not self.queued and not self.ended:
            if self._rank.device.draw_s:
                yield Sleep(self._rank.device.draw_s)
            yield from self._refill()
        if self.queued:
            self._drawn.append(self.queued.popleft())
        elif self.ended:
            self._stopped = True
        else:
            self._drawn.append(None)
            self._empty.append(self._rank.rank)


class Rank:
    """One rank in one run."""

    def __init__(self, sim: Simulation, rank: int, run: int) -> None:
        self.sim, self.rank, self.run = sim, rank, run
        self.device = sim.plan.devices[rank]
        self.record = sim.record
        self.is_cold = True
        self.batch_cost = CostEstimate()
        self.sizes = BatchSizes(sim.plan.sizes)

    @property
    def now_s(self) -> float:
        return self.sim.now_s

    @property
    def worker(self) -> Worker:
        return self.sim.workers[self.rank]

    def live(self) -> Script:
        """Joins, runs all epochs, leaves."""
        plan = self.sim.plan
        self.sim.send(join_of(plan, self.rank))
        yield from self._expect(Welcome)
        for epoch in range(plan.epochs):
            sizes = plan.sizes if self.rank == 0 else None
            self.sim.send(EpochOpened(rank=self.rank, epoch=epoch, sizes=sizes))
            yield from self._expect(BeginEpoch)
            yield Meet(("positions", self.run, epoch), 0.0)
            kind = SyncEpoch if plan.policy == "sync" else CadenceEpoch
            yield from kind(self, epoch).train()
            if plan.pause_s:
                yield Sleep(self.sim.rng.uniform(0.0, plan.pause_s))
        self.sim.send(Left(rank=self.rank))

    def take_all(self, handle: Callable[[Instruction], Script]) -> Script:
        while (instruction := self.sim.next_instruction(self.worker)) is not None:
            yield from handle(instruction)

    def receive(
        self, handle: Callable[[Instruction], Script], waiting_for: str
    ) -> Script:
        if not self.worker.inbox:
            yield Receive(waiting_for)
        instruction = self.sim.next_instruction(self.worker)
        assert instruction is not None
        yield from handle(instruction)

    def compute(self, samples: int) -> Generator[Any, None, tuple[float, bool]]:
        """Trains; returns the seconds, and whether the batch was warm."""
        device = self.device
        busy_s = device.fixed_s + device.sample_s * samples
        if device.slower_from_s is not None and self.now_s >= device.slower_from_s:
            busy_s *= device.slower_by
        busy_s *= max(0.1, self.sim.rng.gauss(1.0, device.jitter))
        if self.is_cold:
            busy_s += device.cold_s
        began_s = self.now_s
        yield Sleep(busy_s)
        self.record.busy.append((self.rank, began_s, self.now_s))
        warm, self.is_cold = not self.is_cold, False
        return busy_s, warm

    def trained(self, epoch: int, batch: int, start: int, stop: int) -> None:
        key = (self.run, epoch)
        self.record.trained[key].append((self.rank, batch, start, stop))
        self.record.last_work_s[key][self.rank] = self.now_s

    def _expect(self, kind: type[Any]) -> Script:
        """Waits for an instruction of one kind, passing over grants left behind."""
        got: list[Instruction] = []

        def handle(instruction: Instruction) -> Script:
            got.append(instruction)
            yield from ()

        while not got or isinstance(got[-1], (GrantSteps, GrantBatches)):
            yield from self.receive(handle, kind.__name__)
        assert isinstance(got[-1], kind), f"{kind.__name__}: {got[-1]}"


class SyncEpoch:
    """`elche.runtime.sync_epoch.SyncEpoch` in virtual time."""

    def __init__(self, rank: Rank, epoch: int) -> None:
        self._rank, self._epoch = rank, epoch
        self._feed = Feed(rank, epoch, lambda: rank.take_all(self._handle))
        self._grants: deque[GrantSteps] = deque()
        self._granted_until = 0
        self._end: EndEpoch | None = None
        self._measured = [0, 0.0, 0.0, True]

    def train(self) -> Script:
        rank = self._rank
        for number in range(rank.sizes.num_batches):
            step, start, stop, counts = yield from self._next(number)
            assert step == number
            began_s = rank.now_s
            busy_s, warm = yield from rank.compute(stop - start)
            yield Meet(("step", rank.run, self._epoch, number), rank.sim.plan.sync_s)
            rank.trained(self._epoch, number, start, start + counts)
            if rank.device.break_at.get(self._epoch) == number:
                yield from self._leave(number + 1)
                return
            wait_s = rank.now_s - began_s - busy_s
            self._account(number, counts, busy_s, wait_s, warm)
        while self._end is None:
            yield from rank.receive(self._handle, "the end of the epoch")
        rank.record.ended[rank.run, self._epoch].add(rank.rank)

    def _leave(self, handed_out: int) -> Script:
        rank = self._rank
        left = EpochLeft(rank=rank.rank, epoch=self._epoch, step=handed_out)
        rank.sim.send(left)
        yield from ()

    def _next(self, number: int) -> Generator[Any, None, Step]:
        while True:
            got = yield from self._feed.next()
            if got is not None:
                return got
            if self._granted_until <= number:
                yield from self._rank.receive(self._handle, f"grant {number}")

    def _handle(self, instruction: Instruction) -> Script:
        yield from ()
        if isinstance(instruction, EndEpoch):
            self._end = instruction
            return
        assert isinstance(instruction, GrantSteps), instruction
        self._grants.append(instruction)
        shares, rank = instruction.shares, self._rank
        first, counts = sum(shares[: rank.rank]), shares[rank.rank]
        few = min(rank.sim.plan.min_share_samples, sum(shares))
        for step in range(instruction.start, instruction.stop):
            assert sum(shares) == rank.sizes.run_of(step)[0]
            rank.record.shares[rank.run, self._epoch, step].add(shares)
            begin, samples = (first, counts) if counts else (0, few)
            self._feed.queued.append((step, begin, begin + samples, counts))
        self._granted_until = instruction.stop
        if self._granted_until == rank.sizes.num_batches:
            self._feed.ended = True

    def _account(
        self, number: int, samples: int, busy_s: float, wait_s: float, warm: bool
    ) -> None:
        measured = self._measured
        measured[0] += samples
        measured[1] += busy_s
        measured[2] += wait_s
        measured[3] = measured[3] and warm
        if not self._grants or number + 1 != self._grants[0].stop:
            return
        grant = self._grants.popleft()
        self._rank.sim.send(
            StepsDone(
                rank=self._rank.rank,
                epoch=self._epoch,
                start=grant.start,
                stop=grant.stop,
                samples=int(measured[0]),
                busy_s=measured[1],
                data_wait_s=0.0,
                sync_wait_s=measured[2],
                warm=bool(measured[3]),
                backward_passes=grant.stop,
            )
        )
        self._measured = [0, 0.0, 0.0, True]


class CadenceEpoch:
    """`elche.runtime.cadence_epoch.CadenceEpoch` in virtual time."""

    def __init__(self, rank: Rank, epoch: int) -> None:
        self._rank, self._epoch = rank, epoch
        self._feed = Feed(rank, epoch, lambda: rank.take_all(self._handle))
        self._window: OpenWindow | None = None
        self._close: CloseWindow | None = None
        self._batches = 0
        self._handed_out = 0
        self._opened_s = 0.0
        self._left = False
        self._end: EndEpoch | None = None

    def train(self) -> Script:
        rank = self._rank
        while True:
            yield from rank.take_all(self._handle)
            if self._end is not None:
                break
            if self._window is None:
                yield from rank.receive(self._handle, "the other ranks")
                continue
            if self._is_over():
                self._close_window()
                continue
            batch = yield from self._feed.next()
            if batch is None:
                yield from self._wait_for_lease()
                continue
            yield from self._train_on(batch)
            self._handed_out += 1
            if rank.device.break_at.get(self._epoch) == self._handed_out:
                yield from self._leave()
                break
        rank.record.ended[rank.run, self._epoch].add(rank.rank)

    def _train_on(self, batch: int) -> Script:
        rank = self._rank
        samples = rank.sizes.run_of(batch)[0]
        busy_s, warm = yield from rank.compute(samples)
        if warm:
            rank.batch_cost.observe(busy_s)
        self._batches += 1
        rank.trained(self._epoch, batch, 0, samples)
        assert self._window is not None
        done = rank.record.in_window[rank.run, self._window.window]
        done[rank.rank] = done.get(rank.rank, 0) + samples
        rank.sim.send(
            BatchDone(
                rank=rank.rank,
                epoch=self._epoch,
                batch=batch,
                samples=samples,
                busy_s=busy_s,
                data_wait_s=0.0,
                warm=warm,
            )
        )

    def _is_over(self) -> bool:
        window = self._window
        assert window is not None
        if self._close is not None and self._close.window == window.window:
            return True
        if window.max_batches is not None and self._batches >= window.max_batches:
            return True
        if window.wall_s is None:
            return False
        elapsed_s = self._rank.now_s - self._opened_s
        cost_s = self._rank.batch_cost.value
        return should_close(elapsed_s, cost_s, window.wall_s, self._batches)

    def _wait_for_lease(self) -> Script:
        window, rank = self._window, self._rank
        assert window is not None
        if self._feed.holds_any or self._close is not None:
            return
        if window.wall_s is None:
            yield from rank.receive(self._handle, "another lease")
            return
        left_s = self._opened_s + window.wall_s - rank.now_s
        if left_s > 0:
            if not rank.worker.inbox:
                yield Receive("a lease or the window's end", left_s)
            return
        yield from rank.take_all(self._handle)
        if self._close is None and self._end is None:
            self._close_window()

    def _close_window(self) -> None:
        window = self._window
        assert window is not None
        self._window = None
        self._rank.sim.send(
            WindowClosed(
                rank=self._rank.rank,
                epoch=self._epoch,
                window=window.window,
                state="adam",
                changed_buffers=(),
            )
        )

    def _handle(self, instruction: Instruction) -> Script:
        rank = self._rank
        if isinstance(instruction, GrantBatches):
            if not self._left:
                self._feed.queued.extend(range(instruction.start, instruction.stop))
        elif isinstance(instruction, OpenWindow):
            self._window, self._close = instruction, None
            self._batches = 0
            self._opened_s = rank.now_s
            rank.record.opened[rank.run, rank.rank].append(instruction.window)
        elif isinstance(instruction, CloseWindow):
            self._close = instruction
            if instruction.drain:
                self._feed.discard()
        elif isinstance(instruction, Reduce):
            yield from self._reduce(instruction)
        else:
            assert isinstance(instruction, EndEpoch), instruction
            self._end = instruction
            self._feed.ended = True

    def _reduce(self, plan: Reduce) -> Script:
        rank = self._rank
        began_s = rank.now_s
        rank.record.plans[rank.run, plan.window].append(plan)
        yield Meet(("window", rank.run, plan.window), rank.sim.plan.sync_s)
        rank.sim.send(
            WindowReduced(
                rank=rank.rank,
                epoch=self._epoch,
                window=plan.window,
                sync_s=rank.now_s - began_s,
            )
        )

    def _leave(self) -> Script:
        rank = self._rank
        self._left = True
        step = self._batches
        rank.sim.send(EpochLeft(rank=rank.rank, epoch=self._epoch, step=step))
        self._feed.discard()
        while self._end is None:
            if self._window is not None:
                self._close_window()
            yield from rank.receive(self._handle, "the draining commit")
