"""One rank's process in a simulated run: join, epochs, leave. Pure."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

from elche.cadence.rank_time import RankTime
from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes, Range
from elche.coordination.accounts.delivered_times import BatchCost
from elche.coordination.accounts.epoch_parts import EpochRest
from elche.coordination.agreement import Settings
from elche.coordination.protocol.events import (
    EpochOpened,
    Event,
    Failed,
    Join,
    JoinReady,
    Left,
    Regrouped,
)
from elche.coordination.protocol.instructions import (
    Abort,
    BeginEpoch,
    EndEpoch,
    GrantBatches,
    Instruction,
    MetricsReported,
    PolicyChosen,
    Reduce,
    Regroup,
    Welcome,
)
from elche.coordination.protocol.messages import PROTOCOL_VERSION, Runs
from elche.sim.cluster import Cluster, Device
from elche.sim.engine import AbortedError, Collective, Engine, Receive, Script
from elche.sim.history import DATA, LEASE, REGROUP, START, History, RankHistory
from elche.sim.simulated_loader import Loaded

LEFT_BEHIND = (GrantBatches, MetricsReported, PolicyChosen)
"""Instructions of an epoch that may still be in the inbox after its end."""
ALL_DEAD = "all ranks with the run's state have died"
CANNOT_GO_ON = "ranks died where the others cannot recover"
"""Error message of a rank, as in a real run."""
FORWARD_PART = 1.0 / 3.0
"""Fraction of a batch's time that its forward pass takes."""
PROBES = 3
FIRST_PROBED_BYTES, MOST_PROBED_BYTES = 2**14, 2**22
PROBE_GROWTH = 8
LONG_PROBE_S, MOST_PROBE_S = 0.05, 0.1
"""Durations (s) that limit a probe of a reduction (`elche.comm.transport.probe`)."""


def join_of(cluster: Cluster, rank: int, device: Device, **changes: Any) -> Join:
    """Returns the join message of a rank."""
    run = cluster.run
    settings = Settings(
        config=run.config,
        loader={"batches": BatchSizes(run.sizes).num_batches},
        min_share_samples=run.min_share_samples,
        epochs=run.epochs,
    )
    values: dict[str, Any] = {
        "rank": rank,
        "version": PROTOCOL_VERSION,
        "world_size": cluster.world_size,
        "settings": settings.as_pairs(),
        "tensors": (("weight", f"[{int(run.model_bytes / 4)}]", "float32"),),
        "device": device.name or "simulated",
        "horizon_batches": device.prefetch + 1,
    }
    return Join(**(values | changes))


class World(ABC):
    """Environment of the simulated ranks.

    Attributes:
        engine: clock and network.
        groups: members of each generation.
        books: account of the models for each run, if kept.
        plans: by window and rank, the latest `Reduce`; for the books.
    """

    def __init__(self, cluster: Cluster, history: History) -> None:
        self.cluster = cluster
        self.history = history
        self.engine = Engine(cluster, self.ended)
        self.groups: dict[int, frozenset[int]] = {}
        self.books: list[Any] = []
        self.plans: dict[int, dict[int, Reduce]] = {}
        names = [device.name for device in cluster.ranks]
        is_host = cluster.run.config.transport.kind == "gloo"
        is_host = is_host or any(name.startswith("CPU") for name in names)
        self.backend = "" if is_host else "NCCL"  # real ranks probe their backend
        self._breaks = {(one.rank, one.epoch): one.batches for one in cluster.breaks}

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Handles an event that has arrived at the coordinator."""

    @abstractmethod
    def epoch_ended(self, run: int, epoch: int, rank: int) -> None:
        """Records that a rank has ended an epoch."""

    @abstractmethod
    def ended(self, rank: int, by_abort: bool) -> None:
        """Records that a process has ended by itself."""

    def break_at(self, rank: int, epoch: int) -> int | None:
        """Returns the batches after which a rank's loop leaves an epoch, or None."""
        return self._breaks.get((rank, epoch))

    def send(self, event: Event) -> None:
        """Sends a rank's message to the core."""
        self.engine.travel("up", event.rank, self.receive, event)

    def take(self, rank: int) -> Instruction | None:
        """Returns the next instruction in a rank's inbox, or None.

        Raises:
            AbortedError: the instruction ends the run.
        """
        inbox = self.engine.processes[rank].inbox
        if not inbox:
            return None
        instruction = inbox.popleft()
        if isinstance(instruction, Abort):
            self.history.aborts[rank] = instruction
            raise AbortedError(instruction.reason)
        return instruction


class Rank:
    """State of a rank's process that all of its epochs share.

    Args:
        sim: the simulation.
        rank: rank number.
        device: device that it trains on.
        epoch_of: returns the script of an epoch, or of a part of it, by its policy.
        is_new: True if it joins a running run.

    Attributes:
        epoch: number of the current or next epoch.
        rest: rest of that epoch at the beginning of the current part.
        gradients_s: time at which the last batch's first gradients were ready.
    """

    def __init__(
        self,
        sim: World,
        rank: int,
        device: Device,
        epoch_of: Callable[[Rank, BeginEpoch], Generator[Any, Any, EndEpoch]],
        *,
        is_new: bool,
    ) -> None:
        self._epoch_of = epoch_of
        self.sim = sim
        self.engine = sim.engine
        self.history = sim.history
        self.rank = rank
        self.device = device
        self.run = self.epoch = 0
        self.whole = BatchSizes(sim.cluster.run.sizes)
        self.rest = EpochRest.whole(self.whole)
        self.generation = 0
        self.sums: RankHistory = sim.history.ranks[rank]
        self.batch_cost = RankTime(1)
        self.sizes = BatchSizes(())
        self.reduced = -1
        self.gradients_s = 0.0
        self.changed: set[int] = set()
        self.excluded: frozenset[int] = frozenset()
        self.is_back = False
        self._probe_s = 0.0
        self._is_new = is_new
        self._is_part = False
        self.is_cold = True
        self._first_batch_s = device.first_batch_s
        self._random = random.Random(f"{sim.cluster.run.seed}/{rank}")
        self._sigma = math.sqrt(math.log1p(device.jitter**2))
        self._drifts = sorted(device.drift, key=lambda one: one.at_s)
        self._factor = 1.0

    @property
    def now_s(self) -> float:
        """Current virtual time."""
        return self.engine.now_s

    @property
    def books(self) -> Any:
        """Account of the run's models; None if none is kept."""
        return self.sim.books[self.run] if self.sim.books else None

    def live(self) -> Script:
        """Runs the whole process."""
        run = self.sim.cluster.run
        for number in range(run.runs):
            self.run, self.epoch = number, 0
            self.reduced, self.excluded = -1, frozenset()
            began_s = self.now_s
            self.sim.send(join_of(self.sim.cluster, self.rank, self.device))
            yield from self._welcome()
            if self._is_new:
                self.sim.send(JoinReady(rank=self.rank))
            else:
                yield from self._probe()
            self.history.wait(self.rank, START, began_s, self.now_s)
            while self.epoch < run.epochs:
                yield from self._train()
            self.sim.send(Left(rank=self.rank))

    def _train(self) -> Script:
        """Trains the next epoch, or the rest of a cut one."""
        began_s = self.now_s
        begin = yield from self._begin()
        self.history.wait(self.rank, START, began_s, self.now_s)
        if begin.policy != "sync":
            self.excluded = frozenset()
        self.sizes = BatchSizes(begin.sizes, BatchCut(*begin.cut))
        end = yield from self._epoch_of(self, begin)
        self.rest = self.rest.after(end)
        self._is_part = bool(self.rest.left.ranges) and not end.is_early
        if self._is_part:
            return
        self.sim.epoch_ended(self.run, self.epoch, self.rank)
        self.epoch += 1
        self.rest = EpochRest.whole(self.whole)
        if pause_s := self.sim.cluster.run.pause_s:
            yield self._random.uniform(0.0, pause_s)

    def take_all(self, handle: Callable[[Instruction], None]) -> None:
        """Handles every message in the inbox."""
        while (instruction := self.sim.take(self.rank)) is not None:
            handle(instruction)

    def compute_s(self, samples: int) -> tuple[float, bool]:
        """Draws a batch's time (s); returns it and whether it may be measured."""
        device, now_s = self.device, self.now_s
        while self._drifts and self._drifts[0].at_s <= now_s:
            self._factor = self._drifts.pop(0).factor
        busy_s = device.compute_s(samples) * self._factor
        sigma = self._sigma
        if sigma:
            busy_s *= math.exp(self._random.gauss(-0.5 * sigma * sigma, sigma))
        if device.spike_probability and self._random.random() < (
            device.spike_probability
        ):
            busy_s *= device.spike_factor
        first_s, self._first_batch_s = self._first_batch_s, 0.0
        is_warm, self.is_cold = not self.is_cold, False
        return busy_s + first_s, is_warm or not device.first_batch_s

    def run_batch(
        self, item: Loaded, name: str, in_backward: Callable[[], None] | None = None
    ) -> Generator[Any, Any, BatchCost]:
        """Waits for a batch and trains on it.

        Args:
            item: the batch, or a step's share of one.
            name: name of its span.
            in_backward: called when the backward pass begins.
        """
        began_s, cause = self.now_s, LEASE if item.was_late else DATA
        if item.ready_s > began_s:
            yield item.ready_s - began_s
            self.history.wait(self.rank, cause, began_s, self.now_s)
        ready_s = self.now_s
        compute_s, is_timed = self.compute_s(item.samples)
        self.gradients_s = ready_s + FORWARD_PART * compute_s
        if in_backward is not None:
            yield FORWARD_PART * compute_s
            in_backward()
            yield compute_s - FORWARD_PART * compute_s
        else:
            yield compute_s
        self.sums.busy_s += compute_s
        self.sums.load_s += item.load_s
        self.history.batch(self.rank, name, ready_s, self.now_s)
        self.trained(item.parts)
        return BatchCost(
            samples=item.counted,
            busy_s=self.now_s - began_s,
            data_wait_s=ready_s - began_s,
            is_timed=is_timed,
        )

    def await_regroup(self, handle: Callable[[Instruction], None]) -> Script:
        """Waits for the next group after a death."""
        inbox, began_s = self.engine.processes[self.rank].inbox, self.now_s
        while not any(isinstance(item, Regroup) for item in inbox):
            if inbox:
                self.take_all(handle)
            else:
                yield Receive("the remaining ranks to be named")
        self.history.wait(self.rank, REGROUP, began_s, self.now_s)

    def parts_of(self, batch: int, start: int, stop: int) -> tuple[Range, ...]:
        """Maps samples of a batch in the current part to the epoch's positions."""
        first = self.sizes.position_of(batch)
        return self.rest.left.origins_of(((first + start, first + stop),)).ranges

    def trained(self, parts: Sequence[Range]) -> None:
        """Records positions of the epoch that this rank has trained."""
        key, history = (self.run, self.epoch), self.history
        self.sums.batches += 1
        self.sums.samples += sum(stop - start for start, stop in parts)
        history.count(key, self.whole.num_samples, parts)
        if history.has_details:
            history.trained[key] += [(self.rank, *part) for part in parts]

    def regroup(
        self, regroup: Regroup, shared: object
    ) -> Generator[Any, Any, dict[int, Any] | None]:
        """Forms the group of a new generation.

        Args:
            regroup: the coordinator's instruction.
            shared: this rank's value for the other members.

        Returns:
            Each rank's value; None if a rank has died and another group is formed.
        """
        began_s = self.now_s
        self.changed.update(regroup.left, regroup.joined)
        group = self.engine.arrive(
            ("group", self.run, regroup.generation),
            self.rank,
            lambda: Collective(
                self.sim.groups[regroup.generation], self.sim.cluster.run.regroup_s
            ),
        )
        group.value = group.value or {}
        group.value[self.rank] = shared
        formed: bool = yield group
        self.history.wait(self.rank, REGROUP, began_s, self.now_s)
        if not formed:
            return None
        self.generation = regroup.generation
        self.is_back = True
        found: dict[int, Any] = group.value
        return found

    def report_regrouped(self, reduced: int, lost: Runs = ()) -> None:
        """Reports that the new group is formed, with the last reduction it settled."""
        self.sim.send(
            Regrouped(
                rank=self.rank,
                generation=self.generation,
                epoch=self.epoch,
                reduced=reduced,
                lost=lost,
            )
        )

    def broadcast(
        self, what: str, source: int, *number: int
    ) -> Generator[Any, Any, bool]:
        """Broadcasts data as large as the model from one rank to the group.

        Returns:
            True if the data has arrived; False if a rank has died.
        """
        began_s, members = self.now_s, self.sim.groups[self.generation]
        link, run = self.engine.link, self.sim.cluster.run
        has_come: bool = yield self.engine.arrive(
            (what, self.run, self.generation, source, *number),
            self.rank,
            lambda: Collective(
                members, link.broadcast_s(run.model_bytes, len(members))
            ),
        )
        self.history.wait(self.rank, REGROUP, began_s, self.now_s)
        return has_come

    def fail(self, error: str) -> NoReturn:
        """Ends this rank like a loop that raises, unless the run has already ended.

        Raises:
            AbortedError: always.
        """
        while self.sim.take(self.rank) is not None:
            pass
        self.history.aborts[self.rank] = Abort(rank=self.rank, reason=error)
        self.sim.send(Failed(rank=self.rank, error=error, traceback=""))
        raise AbortedError(error)

    def note_recovery(self) -> None:
        """Records that the rank trains, or ended its epoch, after a regroup."""
        self.is_back = False
        self.history.note_recovery(self.rank, self.changed, self.now_s)
        self.changed.clear()

    def _begin(self) -> Generator[Any, Any, BeginEpoch]:
        """Waits for the epoch to begin; forms new groups meanwhile."""
        if not self._is_new:
            self._open()
        while True:
            while (instruction := self.sim.take(self.rank)) is None:
                yield Receive(f"epoch {self.epoch} to begin")
            if isinstance(instruction, BeginEpoch):
                return instruction
            if isinstance(instruction, Regroup):
                yield from self._regroup_between(instruction)
            else:
                assert isinstance(instruction, LEFT_BEHIND), instruction

    def _open(self) -> None:
        self.sim.send(
            EpochOpened(
                rank=self.rank,
                epoch=self.epoch,
                sizes=self.rest.part_sizes.runs,
                probe_s=self._probe_s,
                continues=self._is_part,
                backend=self.sim.backend,
            )
        )

    def _regroup_between(self, regroup: Regroup) -> Script:
        """Forms the next group; new ranks copy the state of its first old member.

        The epoch is opened again, since the first rank may have changed.
        """
        self.excluded = frozenset()
        mine = None if self._is_new else (self.epoch, self.rest)
        shared = yield from self.regroup(regroup, mine)
        if shared is None:
            return
        held = {rank: state for rank, state in shared.items() if state is not None}
        if len(held) < len(shared):
            if not held:
                self.fail(ALL_DEAD)
            source = min(held)
            if not (yield from self.broadcast("state", source)):
                return
            if self._is_new:
                self.epoch, self.rest = held[source]
                self._is_new, self._is_part = False, True
                if self.books:
                    self.books.take_steps(self.rank, source)
            yield from self._probe()
        self._open()
        self.report_regrouped(-1)

    def _welcome(self) -> Generator[Any, Any, None]:
        while (instruction := self.sim.take(self.rank)) is None:
            yield Receive("all ranks to join")
        assert isinstance(instruction, Welcome), instruction
        self.generation = instruction.generation

    def _probe(self) -> Script:
        """Measures a reduction under ``auto`` when the group has been formed."""
        run, link = self.sim.cluster.run, self.engine.link
        if run.config.policy != "auto":
            return
        ranks = len(self.sim.groups[self.generation])
        self._probe_s = link.reduce_s(run.model_bytes, ranks)
        longest = min(run.model_bytes, MOST_PROBED_BYTES)
        probed = min(longest, FIRST_PROBED_BYTES)
        while probed < longest:
            took_s = link.reduce_s(probed, ranks)
            yield took_s
            if took_s >= LONG_PROBE_S:
                break
            probed = min(longest, PROBE_GROWTH * probed)
        took_s = link.reduce_s(probed, ranks)
        yield min(PROBES * took_s, max(took_s, MOST_PROBE_S))
