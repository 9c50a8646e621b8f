"""One training run on several ranks, as one rank holds it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from elche.cadence.throughput import CostEstimate
from elche.comm.averaging import ParameterAverager
from elche.comm.buffers import BufferAverager
from elche.comm.process_group import broadcast_tensors
from elche.comm.reducer import GradientReducer
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
from elche.errors import CommunicationError, ConfigError, ElcheError
from elche.runtime.agreement import (
    checksum,
    describe,
    join_event,
    min_share_samples,
    state_tensors,
)
from elche.runtime.cadence_epoch import CadenceEpoch, CadenceHooks
from elche.runtime.connect import connect
from elche.runtime.environment import Placement
from elche.runtime.leased_data import BatchFeed
from elche.runtime.positions import EpochPositions, enumerate_batches, share_keys
from elche.runtime.seeding import rank_seed, seed_rank, separate_rank
from elche.runtime.sync_epoch import SyncEpoch
from elche.runtime.worker import Worker


class Run:
    """What a rank holds of the run; made by :meth:`start`.

    Args:
        worker: this rank's shell, its group formed.
        config: the agreed settings.
        model: the model, equal on all ranks.
        optimizer: its optimizer.
        loader: the user's loader.
        devices: device names of all ranks.
    """

    def __init__(
        self,
        worker: Worker,
        config: RunConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        devices: tuple[str, ...],
    ) -> None:
        self.worker = worker
        self.config = config
        self.reports: list[EndEpoch] = []
        self._model = model
        self._optimizer = optimizer
        self._loader = loader
        self._devices = devices
        self._reducer: GradientReducer | None = None
        self._averager: ParameterAverager | None = None
        self._feed: BatchFeed[Any] | None = None
        self._batch_cost = CostEstimate()
        self._signature: list[tuple[int, bool]] = []
        self._epoch = -1
        self._iteration: weakref.ref[Generator[Any, None, None]] | None = None
        self._under_way: SyncEpoch | CadenceEpoch | None = None
        self._samples_before = 0
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
        settings = describe(config, model, optimizer, loader, epochs)
        placement, channel = connect(placement, config.timeout_s)
        worker = Worker(placement, channel, config.timeout_s)
        try:
            worker.send(join_event(placement, settings, model, loader))
            welcome = worker.expect(Welcome, "all ranks to join")
            worker.form_group(welcome, config.transport)
            tensors = [*model.parameters(), *model.buffers()]
            broadcast_tensors(
                worker.group,
                [t.detach() for t in (*tensors, *state_tensors(optimizer))],
                "the first broadcast",
            )
            run = Run(worker, config, model, optimizer, loader, welcome.devices)
            run._attach()
        except BaseException:
            worker.close(None)
            raise
        return run

    @property
    def progress_samples(self) -> float:
        """Samples of the run so far, the same function on every rank."""
        if isinstance(self._under_way, CadenceEpoch):
            return self._under_way.progress_samples
        done = self._under_way.samples_done if self._under_way is not None else 0
        return float(self._samples_before + done)

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
        line = f"elche: {what}; policy {self.config.policy}"
        synchroniser = self._averager or self._reducer
        if synchroniser is not None:
            line += f", {synchroniser.extra_bytes / 1e6:.1f} MB for reductions"
        return line

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
        if isinstance(self._under_way, CadenceEpoch):
            raise ConfigError(
                "a barrier inside the loop would wait for ever: under policy "
                "'cadence' ranks run different numbers of batches; call it between "
                "epochs"
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
        if self._reducer is not None:
            self._reducer.detach()
        self._feed = None
        self.worker.close(farewell)

    def _end_iteration(self) -> None:
        """Ends an epoch that the loop has left but still holds an iterator of."""
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is not None:
            iteration.close()
        self._iteration = None

    def check_parameters(self) -> None:
        """Refuses a change of what is trained inside an epoch.

        Raises:
            ConfigError: parameters were frozen, unfrozen or added since it began.
        """
        if self._signature != self._current_signature():
            raise ConfigError(
                "parameters were frozen, unfrozen or added inside an epoch; do it "
                "between epochs, on every rank"
            )

    @property
    def _is_mixed(self) -> bool:
        """Whether devices of several kinds round each in its own way."""
        on_cpu = all(name.startswith("CPU") for name in self._devices)
        return not on_cpu and len(set(self._devices)) > 1

    def _layout(self, changed: bool) -> str:
        """What is trained now, and whether that has changed since the last epoch."""
        named = [
            f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}"
            for name, p in self._model.named_parameters()
        ]
        digest = hashlib.sha256("\n".join(named).encode()).hexdigest()[:16]
        return f"{digest} {'changed' if changed else 'same'}"

    def _current_signature(self) -> list[tuple[int, bool]]:
        return [(id(p), p.requires_grad) for p in self._model.parameters()]

    def _build(self) -> None:
        """Builds what the policy needs for the parameters that are trained now."""
        if self._reducer is not None:
            self._reducer.detach()
        self._signature = self._current_signature()
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        group = self.worker.group
        if self.config.policy == "sync":
            self._reducer = GradientReducer(
                trainable,
                group,
                int(self.config.bucket_cap_mb * 2**20),
                BufferAverager.for_model(self._model, group),
            )
            self._reducer.attach()
        else:
            self._averager = ParameterAverager(
                trainable,
                self._model,
                self._optimizer,
                group,
                reset_state=self.config.optimizer_state == "reset",
            )
            self._averager.build()

    def _attach(self) -> None:
        """Builds what the run needs, and gives this rank its own randomness."""
        self._build()
        rank = self.worker.rank
        if self.config.seed is None:
            separate_rank(rank)
        else:
            seed_rank(self.config.seed, rank)
        generator = torch.Generator()
        generator.manual_seed(rank_seed(torch.initial_seed(), rank))
        self._feed = BatchFeed(self._loader, generator, self._refill)

    def _refill(self) -> None:
        if self._under_way is not None:
            self._under_way.refill()

    def _run_epoch(self) -> Generator[Any, None, None]:
        positions = self._open_epoch()
        assert self._feed is not None
        self._feed.start()
        run = self._epoch_run(positions)
        self._under_way = run
        try:
            yield from run.batches()
        finally:
            if not self._closed:
                self._feed.finish()
                self._under_way = None
                if run.end is not None:
                    self._samples_before += sum(run.end.samples)
                elif isinstance(run, SyncEpoch):
                    self._samples_before += run.samples_done
                if run.end is not None:
                    self.reports.append(run.end)

    def _open_epoch(self) -> EpochPositions:
        """Agrees on the epoch and shares its positions."""
        self._epoch += 1
        worker = self.worker
        keys, sizes = None, None
        if worker.rank == 0:
            keys, sizes = enumerate_batches(self._loader, self._epoch)
        changed = self._signature != self._current_signature()
        worker.send(
            EpochOpened(
                rank=worker.rank,
                epoch=self._epoch,
                sizes=sizes.runs if sizes is not None else None,
                layout=self._layout(changed),
                checksum="" if changed or self._is_mixed else checksum(self._model),
            )
        )
        begin = worker.expect(BeginEpoch, "all ranks to open the epoch")
        if changed:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            broadcast_tensors(
                worker.group, [t.detach() for t in tensors], "sharing a changed model"
            )
            self._build()
        shared = share_keys(worker.group, keys)
        return EpochPositions(
            shared, BatchSizes(begin.sizes), self._epoch, self.config.seed
        )

    def _epoch_run(self, positions: EpochPositions) -> SyncEpoch | CadenceEpoch:
        assert self._feed is not None
        if self._reducer is not None:
            return SyncEpoch(
                self.worker,
                self._feed,
                positions,
                self._reducer,
                min_share_samples(self._model),
                self.check_parameters,
            )
        assert self._averager is not None
        self._averager.rebase()
        return CadenceEpoch(
            self.worker,
            self._feed,
            positions,
            self._averager,
            self._batch_cost,
            CadenceHooks(self._keep_error, self.check_parameters),
        )

    def _keep_error(self, error: ElcheError) -> None:
        self._pending_error = error
