"""One training run on several ranks, as one rank holds it."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from elche.cadence.throughput import CostEstimate
from elche.comm.equal_tensors import make_equal
from elche.comm.probe import probe_reduction_s
from elche.config import RunConfig
from elche.coordination.ledger import BatchSizes
from elche.coordination.messages import (
    BarrierPassed,
    BarrierReached,
    BeginEpoch,
    EndEpoch,
    EpochOpened,
    Event,
    Failed,
    Instruction,
    Welcome,
)
from elche.coordination.metrics import EpochMetrics, WindowMetrics
from elche.coordination.window_loop import WindowLoop
from elche.errors import (
    CommunicationError,
    ConfigError,
    ElcheError,
    NonFiniteError,
)
from elche.runtime.agreement import (
    checksum,
    describe,
    join_event,
    min_share_samples,
    state_tensors,
)
from elche.runtime.connect import connect
from elche.runtime.environment import Placement
from elche.runtime.farewell import failure_of
from elche.runtime.gradient_sync import refuse_stray_gradients
from elche.runtime.leased_batches import LeasedBatches
from elche.runtime.memory_limits import RankHost, check_caps
from elche.runtime.news import RunNews, with_samples
from elche.runtime.plan_file import PlanFile
from elche.runtime.positions import EpochPositions, enumerate_batches, share_keys
from elche.runtime.scalars import ScalarLog
from elche.runtime.seeding import rank_seed, seed_rank, separate_rank
from elche.runtime.succession import rates, take_over
from elche.runtime.sync_epoch import SyncEpoch
from elche.runtime.synchroniser import Synchroniser
from elche.runtime.window_epoch import EpochHooks, WindowEpoch
from elche.runtime.window_sync import refuse_state
from elche.runtime.worker import Worker

logger = logging.getLogger(__name__)

STEPS_WITHOUT_BACKWARD = 3
"""Under ``sync``, when it is no skipped batch any more if none had a backward pass."""


class Run:
    """What a rank holds of the run; made by :meth:`start`.

    Args:
        worker: this rank's shell, its group formed.
        config: the agreed settings.
        model: the model, equal on all ranks.
        optimizer: its optimizer.
        loader: the user's loader.
        devices: device names of all ranks.
        plans: what is recorded or replayed.

    Attributes:
        last_samples: of the batch that the last epoch ended with, under ``sync``.
    """

    def __init__(
        self,
        worker: Worker,
        config: RunConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        devices: tuple[str, ...],
        plans: PlanFile,
    ) -> None:
        self.worker = worker
        self.config = config
        self.reports: list[EndEpoch] = []
        self.news = RunNews(worker.rank)
        worker.on_news = self.news.take
        self._model = model
        self._optimizer = optimizer
        self._loader = loader
        self._devices = devices
        self._synchroniser = Synchroniser(
            config, model, optimizer, worker.group, worker.side_group
        )
        self._probe_s = 0.0
        self._plans = plans
        self._batches: LeasedBatches | None = None
        self._batch_cost = CostEstimate()
        self._epoch = -1
        self._iteration: weakref.ref[Generator[Any, None, None]] | None = None
        self._under_way: SyncEpoch | WindowEpoch | None = None
        self._samples_before = self._samples_resumed = 0
        self.last_samples = 0
        self._steps_without_backward = 0
        self._pending_error: ElcheError | None = None
        self._closed = False

    @staticmethod
    def start(
        placement: Placement,
        config: RunConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        epochs: int | None,
    ) -> Run:
        """Joins the run, and makes all replicas equal to rank 0's.

        Raises:
            MismatchError: ranks disagree.
            CommunicationError: the ranks did not come together.
        """
        hints = config.speed_hints
        if hints is not None and len(hints) != placement.world_size:
            raise ConfigError(
                f"expected a speed hint per rank ({placement.world_size}), got "
                f"{len(hints)}"
            )
        check_caps(
            config, loader.batch_size, placement.world_size, min_share_samples(model)
        )
        placement, channel = connect(placement, config.timeout_s)
        worker = Worker(placement, channel, config.timeout_s)
        try:
            plans = PlanFile.for_rank(config, placement.rank)
            settings = describe(config, model, optimizer, loader, epochs)
            worker.send(join_event(placement, settings, model, loader))
            welcome = worker.expect(Welcome, "all ranks to join")
            worker.form_group(welcome, config.transport)
            states = state_tensors(optimizer)
            named = [
                *model.named_parameters(),
                *model.named_buffers(),
                *((f"state {index}", state) for index, state in enumerate(states)),
            ]
            make_equal(worker.group, named, "the first broadcast")
            run = Run(worker, config, model, optimizer, loader, welcome.devices, plans)
            run._attach()
        except BaseException as error:
            worker.close(failure_of(worker.rank, error))
            raise
        return run

    @property
    def progress_samples(self) -> float:
        """Samples of the run so far, the same function on every rank."""
        before = self._samples_resumed
        if isinstance(self._under_way, WindowEpoch):
            return before + self._under_way.progress_samples
        done = self._under_way.samples_done if self._under_way is not None else 0
        return float(before + self._samples_before + done)

    def state_dict(self) -> dict[str, Any]:
        """What this rank's run holds between epochs beside model and optimizer.

        Raises:
            ConfigError: inside an epoch.
            ProtocolError: the parameters have moved since it ended.
        """
        self._expect_between_epochs("state_dict")
        windows = self._synchroniser.windows
        return {
            "samples": self._samples_resumed + self._samples_before,
            "averaging": None if windows is None else windows.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`; with all ranks.

        Raises:
            ConfigError: inside an epoch, or nothing is averaged in this run.
            MismatchError: a rank's state does not fit, or ranks' do not belong
                together.
        """
        self._expect_between_epochs("load_state_dict")
        windows, averaging = self._synchroniser.windows, state["averaging"]
        if windows is not None:
            windows.load_state_dict(averaging)
        elif self.config.policy == "auto":
            if averaging is not None:
                logger.info("policy 'auto' begins as sync: averaging begins anew")
        else:
            refuse_state(averaging)
        self._samples_resumed = state["samples"] - self._samples_before

    def _expect_between_epochs(self, call: str) -> None:
        if self._under_way is not None:
            raise ConfigError(
                f"{call}() inside an epoch, where ranks hold different things; call it "
                "between epochs, on every rank"
            )

    @property
    def host(self) -> RankHost:
        """What this rank does about a batch that is run in micro-batches."""
        return RankHost(self._synchroniser, self.worker)

    @property
    def scalars(self) -> ScalarLog:
        """What this rank logs."""
        return self.news.scalars

    @property
    def window_metrics(self) -> deque[WindowMetrics]:
        """Of windows that have ended; always empty on ranks other than 0."""
        return self.news.window_metrics

    @property
    def epoch_metrics(self) -> list[EpochMetrics]:
        """Of epochs that have ended."""
        return self.news.epoch_metrics

    @property
    def samples_in_hand(self) -> int:
        """Samples of the batch in hand that count for this rank."""
        return 0 if self._under_way is None else self._under_way.samples_in_hand

    def headline(self) -> str:
        """The line that names the devices and whether they differ."""
        kinds = list(dict.fromkeys(self._devices))
        count = len(self._devices)
        if len(kinds) == 1:
            what = f"{count} devices, equal: {count} x {kinds[0]}"
        else:
            parts = [f"{self._devices.count(kind)} x {kind}" for kind in kinds]
            what = f"{count} devices, unequal: {', '.join(parts)}"
        held_mb = self._synchroniser.extra_bytes / 1e6
        return (
            f"elche: {what}; policy {self.config.policy}, {held_mb:.1f} MB for "
            "reductions"
        )

    def check(self) -> None:
        """Raises what went wrong where nothing could be raised."""
        if self._pending_error is not None:
            error, self._pending_error = self._pending_error, None
            raise error

    def barrier(self, name: str) -> None:
        """Waits until every rank is here.

        Raises:
            ConfigError: inside a loop under ``cadence``.
        """
        self.check()
        if isinstance(self._under_way, WindowEpoch):
            raise ConfigError(
                "a barrier inside the loop would wait for ever: under policy "
                f"{self.config.policy!r} ranks run different numbers of batches; call "
                "it between epochs"
            )
        passed: list[BarrierPassed] = []

        def handle(instruction: Instruction) -> None:
            if isinstance(instruction, BarrierPassed):
                passed.append(instruction)
            elif isinstance(self._under_way, SyncEpoch):
                self._under_way.handle(instruction)

        self.worker.send(BarrierReached(rank=self.worker.rank, name=name))
        while not passed:
            self.worker.receive(handle, f"all ranks at {name}")

    def epoch(self) -> Iterator[Any]:
        """Opens the next epoch on all ranks and hands out this rank's part."""
        if self._closed:
            raise CommunicationError("this run has ended; call elche.setup again")
        self._end_iteration()
        self.check()
        iteration = self._run_epoch()
        self._iteration = weakref.ref(iteration)
        return iteration

    def close(self, farewell: Event) -> None:
        """Leaves the run. May be called twice."""
        if self._closed:
            return
        if isinstance(farewell, Failed):
            self._closed = True
        else:
            self._end_iteration()
        self._closed = True
        self._synchroniser.detach()
        self._batches = None
        self.worker.close(farewell)

    def _end_iteration(self) -> None:
        """Ends an epoch that the loop has left but still holds an iterator of."""
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is not None:
            iteration.close()
        self._iteration = None

    @property
    def _is_mixed(self) -> bool:
        """Whether devices of several kinds round each in its own way."""
        on_cpu = all(name.startswith("CPU") for name in self._devices)
        return not on_cpu and len(set(self._devices)) > 1

    def _attach(self) -> None:
        """Builds what the run needs, and gives this rank its own randomness."""
        self._synchroniser.build()
        if self.config.policy == "auto":
            numel = self._synchroniser.num_parameters
            self._probe_s = probe_reduction_s(self.worker.group, numel)
        rank = self.worker.rank
        if self.config.seed is None:
            separate_rank(rank)
        else:
            seed_rank(self.config.seed, rank)
        generator = torch.Generator()
        generator.manual_seed(rank_seed(torch.initial_seed(), rank))
        self._batches = LeasedBatches(
            self._loader, generator, self.worker.placement.device, self._refill
        )

    def _refill(self) -> None:
        if self._under_way is not None:
            self._under_way.refill()

    def _run_epoch(self) -> Generator[Any, None, None]:
        positions, window = self._open_epoch()
        batches = self._batches
        assert batches is not None
        batches.start(positions)
        run = self._epoch_run(positions, window)
        self._under_way = run
        try:
            yield from run.batches()
            if isinstance(run, SyncEpoch) and run.switch is not None:
                run = self._under_way = self._switched(run, positions)
                yield from run.batches()
        except NonFiniteError as error:
            self._pending_error = named = with_samples(error, positions)
            raise named from None
        except Exception as error:
            self._pending_error = CommunicationError(
                f"epoch {self._epoch} was broken off on rank {self.worker.rank} by "
                f"{error!r}, which the loop caught; other ranks wait for what this "
                "one was given, so the run cannot go on"
            )
            raise
        finally:
            if not self._closed:
                batches.finish()
                self._under_way = None
                self.last_samples = run.samples_in_hand
                if run.end is not None:
                    self._samples_before += sum(run.end.samples)
                elif isinstance(run, SyncEpoch):
                    self._samples_before += run.samples_done
                self._plans.keep("" if run.end is None else run.end.plan)
                if run.end is not None:
                    self.reports.append(run.end)
                    self.news.name_left_out(run.end, positions)

    def _open_epoch(self) -> tuple[EpochPositions, int]:
        """Agrees on the epoch and shares its positions; also its first window."""
        self._epoch += 1
        self.news.scalars.clear()  # of an epoch that was left early
        worker = self.worker
        keys, sizes = None, None
        if worker.rank == 0:
            keys, sizes = enumerate_batches(self._loader, self._epoch)
        changed = self._synchroniser.is_changed
        worker.send(
            EpochOpened(
                rank=worker.rank,
                epoch=self._epoch,
                sizes=sizes.runs if sizes is not None else None,
                layout=self._synchroniser.layout(),
                checksum="" if changed or self._is_mixed else checksum(self._model),
                plan=self._plans.epoch(self._epoch),
                probe_s=self._probe_s,
                rates=rates(self._optimizer, worker.rank),
            )
        )
        begin = worker.expect(BeginEpoch, "all ranks to open the epoch")
        if changed:
            named = [*self._model.named_parameters(), *self._model.named_buffers()]
            make_equal(worker.group, named, "sharing a changed model")
        if changed or begin.policy != self._synchroniser.policy:
            self._synchroniser.build(begin.policy)
        if begin.state_from is not None:
            take_over(worker.group, self._model, self._optimizer, begin.state_from)
        shared = share_keys(worker.group, keys)
        positions = EpochPositions(
            shared, BatchSizes(begin.sizes), self._epoch, self.config.seed
        )
        return positions, begin.window

    def _epoch_run(
        self, positions: EpochPositions, window: int
    ) -> SyncEpoch | WindowEpoch:
        reducer, batches = self._synchroniser.reducer, self._batches
        assert batches is not None
        self._steps_without_backward = 0
        if reducer is not None:
            return SyncEpoch(
                self.worker,
                batches,
                positions,
                reducer,
                min_share_samples(self._model),
                self._hooks(),
            )
        return self._window_epoch(positions, window)

    def _switched(self, before: SyncEpoch, positions: EpochPositions) -> WindowEpoch:
        """Windows take over what is left of the epoch."""
        assert before.switch is not None
        self._synchroniser.build(before.switch.policy)
        epoch = self._window_epoch(positions, before.switch.window)
        for instruction in before.later:
            epoch.handle(instruction)
        return epoch

    def _window_epoch(self, positions: EpochPositions, window: int) -> WindowEpoch:
        sync = self._synchroniser.windows
        assert sync is not None
        batches = self._batches
        assert batches is not None
        sync.rebase()
        loop = WindowLoop(
            self._batch_cost, overlapped=sync.is_overlapped, reduced=window - 1
        )
        return WindowEpoch(self.worker, batches, positions, sync, loop, self._hooks())

    def _hooks(self) -> EpochHooks:
        return EpochHooks(
            self._keep_error,
            self._check_training,
            self.news.drain_scalars,
            self._synchroniser.parameter_norm,
        )

    def _check_training(self) -> None:
        """Refuses what elche cannot see, or cannot follow, inside an epoch."""
        self._synchroniser.check()
        reducer = self._synchroniser.reducer
        if reducer is not None and reducer.backward_passes == 0:
            self._steps_without_backward += 1
            if self._steps_without_backward > STEPS_WITHOUT_BACKWARD:
                refuse_stray_gradients(list(self._model.parameters()))

    def _keep_error(self, error: ElcheError) -> None:
        self._pending_error = error
