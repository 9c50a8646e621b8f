"""Life of one rank in a simulated run: join, epochs, leave. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from typing import Any

from elche.cadence.throughput import CostEstimate
from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.protocol.events import EpochOpened, Join, Left, Regrouped
from elche.coordination.protocol.instructions import (
    BeginEpoch,
    GrantBatches,
    GrantSteps,
    Instruction,
    MetricsReported,
    PolicyChosen,
    Regroup,
    Welcome,
)
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.sim.cluster import Cluster, Device
from elche.sim.engine import Collective, Receive, Script
from elche.sim.history import REGROUP, START, RankHistory
from elche.sim.world import World

LEFT_BEHIND = (GrantBatches, GrantSteps, MetricsReported, PolicyChosen)
"""Instructions of an epoch that may still be in the inbox after its end."""
PROBES = 3
FIRST_PROBED_BYTES, MOST_PROBED_BYTES = 2**14, 2**22
PROBE_GROWTH = 8
LONG_PROBE_S, MOST_PROBE_S = 0.05, 0.1
"""How a rank measures a reduction (`elche.comm.transport.probe`)."""


def join_of(cluster: Cluster, rank: int, device: Device, **changes: Any) -> Join:
    """How a rank presents itself."""
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
        "horizon_batches": device.horizon_batches,
    }
    return Join(**(values | changes))


class Rank:
    """What a rank's process knows, and what all of its epochs share.

    Args:
        sim: the run.
        rank: its number.
        device: what it trains on.
        epoch_of: makes the script of an epoch, by the run's policy.
        is_new: it joins a run under way.
    """

    def __init__(
        self,
        sim: World,
        rank: int,
        device: Device,
        epoch_of: Callable[[Rank, BeginEpoch], Script],
        *,
        is_new: bool,
    ) -> None:
        self._epoch_of = epoch_of
        self.sim = sim
        self.engine = sim.engine
        self.history = sim.history
        self.rank = rank
        self.device = device
        self.run = 0
        self.generation = 0
        self.sums: RankHistory = sim.history.ranks[rank]
        self.batch_cost = CostEstimate()
        self.sizes = BatchSizes(())
        self.reduced = -1
        self.changed: set[int] = set()
        self.left_out: frozenset[int] = frozenset()
        self.is_back = False
        self._probe_s = 0.0
        self._is_new = is_new
        self._is_cold = True
        self._random = random.Random(f"{sim.cluster.run.seed}/{rank}")
        self._sigma = math.sqrt(math.log1p(device.jitter**2))
        self._drifts = list(device.drifts)
        self._factor = 1.0

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.engine.now_s

    def live(self) -> Script:
        """The whole life of the process."""
        run = self.sim.cluster.run
        for number in range(run.runs):
            self.run = number
            self.reduced, self.left_out = -1, frozenset()
            self.sim.send(join_of(self.sim.cluster, self.rank, self.device))
            epoch = 0
            while epoch < run.epochs:
                began_s = self.now_s
                begin = yield from self._begin(epoch)
                self.history.wait(self.rank, START, began_s, self.now_s)
                epoch = begin.epoch
                if begin.policy != "sync":
                    self.left_out = frozenset()
                self.sizes = BatchSizes(begin.sizes, BatchCut(*begin.cut))
                yield from self._epoch_of(self, begin)
                epoch += 1
                if run.pause_s:
                    yield self._random.uniform(0.0, run.pause_s)
            self.sim.send(Left(rank=self.rank))

    def take(self) -> Instruction | None:
        """The next instruction in the inbox."""
        return self.sim.take(self.rank)

    def take_all(self, handle: Callable[[Instruction], None]) -> None:
        """Hands over everything in the inbox."""
        inbox = self.engine.processes[self.rank].inbox
        while inbox:
            instruction = self.sim.take(self.rank)
            assert instruction is not None
            handle(instruction)

    def compute_s(self, samples: int) -> tuple[float, bool]:
        """Draws how long a batch takes, and whether it may be timed."""
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
        is_warm, self._is_cold = not self._is_cold, False
        if not is_warm:
            busy_s += device.first_batch_s
        return busy_s, is_warm or not device.first_batch_s

    def trained(self, epoch: int, batch: int, start: int, stop: int) -> None:
        """Notes what this rank has trained on: samples of a global batch."""
        self.sums.batches += 1
        self.sums.samples += stop - start
        if self.history.has_details:
            self.history.trained[self.run, epoch].append(
                (self.rank, batch, start, stop)
            )

    def regroup(
        self, regroup: Regroup, epoch: int, opened: EpochOpened | None = None
    ) -> Generator[Any, Any, bool]:
        """Forms the group of a new generation; False if that failed.

        An epoch that was opened is opened again before the word that the group stands:
        the rank that speaks for all may be another one now.
        """
        began_s = self.now_s
        self.changed.update(regroup.left, regroup.joined)
        group = self.engine.arrive(
            ("group", self.run, regroup.generation),
            self.rank,
            lambda: Collective(
                self.sim.groups[regroup.generation],
                self.sim.cluster.run.regroup_s,
            ),
        )
        formed: bool = yield group
        self.history.wait(self.rank, REGROUP, began_s, self.now_s)
        if formed:
            self.generation = regroup.generation
            self.is_back = True
            if opened is not None:
                self.sim.send(opened)
            self.sim.send(
                Regrouped(
                    rank=self.rank,
                    generation=regroup.generation,
                    epoch=epoch,
                    reduced=self.reduced,
                )
            )
        return formed

    def goes_on(self) -> None:
        """Trains, or has ended its epoch, after a change of the membership."""
        self.is_back = False
        self.history.going_again(self.rank, self.changed, self.now_s)
        self.changed.clear()

    def _begin(self, epoch: int) -> Generator[Any, Any, BeginEpoch]:
        """Waits for the epoch to begin; forms new groups meanwhile."""
        opened: EpochOpened | None = None
        if epoch or not self._is_new:
            if epoch == 0:
                yield from self._welcome()
                yield from self._probe()
            plans = self.sim.cluster.run.plans
            opened = EpochOpened(
                rank=self.rank,
                epoch=epoch,
                sizes=self.sim.cluster.run.sizes,
                plan=plans[epoch] if epoch < len(plans) else "",
                probe_s=self._probe_s,
            )
            self.sim.send(opened)
        while True:
            while (instruction := self.take()) is None:
                yield Receive(f"epoch {epoch} to begin")
            if isinstance(instruction, BeginEpoch):
                break
            if isinstance(instruction, Welcome):
                self.generation = instruction.generation
            elif isinstance(instruction, Regroup):
                yield from self.regroup(instruction, epoch - 1, opened)
            else:
                assert isinstance(instruction, LEFT_BEHIND), instruction
        if opened is None:  # a newcomer forms the group with the others
            self._is_new = False
            joined = Regroup(
                rank=self.rank,
                generation=self.generation,
                left=(),
                joined=(self.rank,),
            )
            yield from self.regroup(joined, instruction.epoch)
        return instruction

    def _welcome(self) -> Generator[Any, Any, None]:
        while (instruction := self.take()) is None:
            yield Receive("all ranks to join")
        assert isinstance(instruction, Welcome), instruction
        self.generation = instruction.generation

    def _probe(self) -> Script:
        """Under ``auto``, measures a reduction when the group has been formed."""
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
