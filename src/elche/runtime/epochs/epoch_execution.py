"""Execution of an epoch's parts on one rank: of steps, of windows, or of both."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from elche.cadence.rank_time import RankTime
from elche.comm.model_buffers.known_buffers import shared_tensors
from elche.comm.tensors.equal_tensors import make_equal
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.protocol.events import EpochCut, Failed
from elche.coordination.protocol.instructions import BeginEpoch
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.coordination.windows.window_loop import WindowLoop
from elche.errors import CommunicationError, ConfigError, ElcheError, NonFiniteError
from elche.runtime.data.leased_data import LeasedBatches
from elche.runtime.data.positions import EpochPositions
from elche.runtime.epochs.epoch_opening import EpochOpening
from elche.runtime.epochs.window_epoch import WindowEpoch
from elche.runtime.process.shutdown import exit_watch
from elche.runtime.rank_settings import min_share_samples
from elche.runtime.report.notifications import with_samples
from elche.runtime.sync.epoch_hooks import EpochHooks
from elche.runtime.sync.resume_sync import broadcast_from
from elche.runtime.sync.step_account import open_steps
from elche.runtime.sync.sync_epoch import TOO_EARLY, SyncEpoch
from elche.runtime.training import Training
from elche.runtime.watch.model_sums import ModelSums, kind_of
from elche.runtime.watch.observer import LoopObserver
from elche.torch_internals.held import BatchNormBase
from elche.torch_internals.passes import is_compiled


@dataclass(frozen=True, slots=True)
class EpochPart:
    """An epoch, or the rest of a cut one, opened by all ranks.

    Attributes:
        positions: positions of the part.
        window: number of its first window.
        sizes: global batches of the whole epoch.
        is_first: this loop has run no part of the epoch before.
        is_by_steps: the loop runs a given number of steps.
    """

    positions: EpochPositions
    window: int
    sizes: BatchSizes
    is_first: bool
    is_by_steps: bool


@final
class EpochExecution:
    """Runs an epoch's parts one after another, under the policy in force.

    Attributes:
        generator: generator of the loader's randomness.
        under_way: executor of the current part; None outside epochs.
        last_samples: samples of the last part's last batch.
    """

    def __init__(
        self, training: Training, observer: LoopObserver, opening: EpochOpening
    ) -> None:
        self._training = training
        self._observer = observer
        self._opening = opening
        self._worker = worker = opening.worker
        self._synchroniser = opening.synchroniser
        self._batch_cost = RankTime(1)
        self._stepped = self._windowed = -1  # last epochs with steps, with windows
        self._ratio = 0, 0
        self._numbers = NonFiniteRecord()
        self._pending_error: ElcheError | None = None
        self._is_asked = False
        self.generator = torch.Generator()
        self._batches = LeasedBatches(
            training.loader,
            self.generator,
            worker.placement.device,
            self._refill,
            training.weights,
        )
        self.under_way: SyncEpoch | WindowEpoch | None = None
        self.last_samples = 0

    @property
    def sums(self) -> ModelSums:
        """Checksums of the model as laid out now; none on a single rank."""
        worker = self._worker
        named = self._training.model.named_parameters()
        is_alone = len(worker.members) == 1
        return ModelSums(() if is_alone else named, kind_of(worker.placement.device))

    def close(self) -> None:
        """Releases the batches; a part in progress is abandoned."""
        del self._batches

    def _refill(self) -> None:
        if self.under_way is not None:
            self.under_way.refill()

    def check(self) -> None:
        """Raises a pending error that could not be raised where it occurred."""
        error, self._pending_error = self._pending_error, None
        if error is not None:
            raise error

    def regroup(self) -> None:
        """Forms the next group outside windows, after deaths or before joins."""
        if isinstance(self.under_way, SyncEpoch):
            self.under_way.regroup()
            return
        self._opening.regroup()
        reducer, graphs = self._synchroniser.reducer, self._observer.graphs
        if reducer and self._opening.steps.has_lost and open_steps(reducer, graphs):
            raise CommunicationError(TOO_EARLY)

    def prepare(self, begin: BeginEpoch, *, is_changed: bool, wants_keys: bool) -> None:
        """Builds the policy's reducers, and copies the model of a rank that ran alone.

        Args:
            begin: the part that all ranks have opened.
            is_changed: the trained parameters have changed since the last build.
            wants_keys: this rank waits for the positions of the epoch.
        """
        is_other = begin.policy != self._synchroniser.policy
        rebuilds = is_changed or is_other
        self._opening.steps.take_back(rebuilds=rebuilds)
        if not rebuilds:
            return
        if is_other:
            self._observer.graphs.moved(begin.policy)
        build = partial(self._build, begin, is_changed=is_changed)
        self._opening.build(begin.policy, build, wants_keys=wants_keys)
        self._numbers = NonFiniteRecord()  # it counts what is trained

    def _build(self, begin: BeginEpoch, *, is_changed: bool) -> None:
        """Builds in the current group, with all its ranks; may be repeated in the next.

        Raises:
            CommunicationError: the rank that trained alone has died.
        """
        group, model = self._worker.group, self._training.model
        source = begin.state_from
        if is_changed:
            named = shared_tensors(model, group)
            make_equal(group, named, "sharing a changed model")
        self._synchroniser.build(begin.policy)
        if source is None:
            return
        if source not in group.ranks:
            raise CommunicationError(
                f"rank {source}, which trained alone, died before the others had its "
                "optimizer's state: restart the run from its last checkpoint"
            )
        place = list(group.ranks).index(source)
        broadcast_from(group, model, self._observer.optimizers(), place)

    def begin(self, part: EpochPart) -> SyncEpoch | WindowEpoch:
        """Begins a part, on all ranks together; returns its executor."""
        self._is_asked = False
        if not part.is_first:
            self._numbers = NonFiniteRecord()  # it names steps of a part
        self._batches.start(part.positions)
        self._worker.name_samples = partial(with_samples, positions=part.positions)
        run = self.under_way = self._made(part)
        config, is_counted = self._training.config, self._training.epochs is not None
        is_counted = config.leave_out and (is_counted or part.is_by_steps)
        self._observer.begin_part(self._synchroniser, is_counted=is_counted)
        return run

    def run(self) -> Generator[Any, None, None]:
        """Yields this rank's batches of the part; a break ends the epoch."""
        run, observer = self.under_way, self._observer
        assert run is not None
        try:
            if isinstance(run, WindowEpoch):
                self._synchroniser.refuse_nan(self._opening.epoch)
            tracked = None if torch.is_grad_enabled() else batches_tracked()
            with contextlib.closing(run.batches()) as batches:
                for batch in batches:
                    exit_watch.code = None  # the loop continues, so it was not left
                    observer.graphs.thread = threading.get_ident()
                    observer.begin_batch(batch, run.current_samples)
                    try:
                        yield batch
                    except GeneratorExit:
                        self._end_by_exit()
                        raise
                    if tracked is not None and not observer.graphs.has_graph:
                        refuse_statistics(tracked)
                    tracked = None
                    if observer.schedulers.steps:
                        observer.schedulers.batch_done()
                    self._ask_for_cut()
        except GeneratorExit:
            observer.steps.has_left = True
            raise
        except NonFiniteError as error:
            self._pending_error = named = self._worker.name_samples(error)
            raise named from None
        except Exception as error:
            self._pending_error = CommunicationError(
                f"epoch {self._opening.epoch} was interrupted on rank "
                f"{self._worker.rank} by {error!r}, which the loop caught; other "
                "ranks wait for this rank's batches, so the run cannot continue"
            )
            raise

    def end(self) -> SyncEpoch | WindowEpoch:
        """Ends the part, complete, cut or aborted; returns its executor."""
        run = self.under_way
        assert run is not None
        is_cut = run.end is None or bool(run.end.left) or run.end.is_early
        self._batches.finish(is_over=not is_cut)
        self.under_way = None
        self._observer.copies.is_in_steps = False
        self.last_samples = run.current_samples
        self._observer.guard.is_inside = False
        return run

    def _ask_for_cut(self) -> None:
        """Requests a cut: the first rank for a checkpoint, any rank for an end."""
        worker, pauses = self._worker, self._training.pauses
        is_first = worker.groups.members[0] == worker.rank
        if self._is_asked or not pauses.wants_cut(is_first=is_first):
            return
        self._is_asked = True
        epoch, is_end = self._opening.epoch, pauses.wants_end()
        worker.send(EpochCut(rank=worker.rank, epoch=epoch, is_end=is_end))

    def _end_by_exit(self) -> None:
        """Ends the run on all ranks if the loop was left by ``sys.exit``: no break."""
        if (code := exit_watch.code) is not None:
            rank, cause = self._worker.rank, f"sys.exit({code}) inside the loop"
            ended = Failed(rank=rank, error=cause, traceback="", exit_code=code)
            self._worker.close(ended)

    def _made(self, part: EpochPart) -> SyncEpoch | WindowEpoch:
        """Makes the executor of a part, under the policy in force."""
        training, reducer = self._training, self._synchroniser.reducer
        config, modules = training.config, training.model.modules()
        is_fixed = config.debug.deterministic or config.shares == "fixed"
        # A compiled model gets shares of several sizes.
        varies = reducer is not None and not is_fixed and any(map(is_compiled, modules))
        self._batches.marks_dynamic = varies
        common = self._worker, self._batches, part.positions
        if reducer is not None:
            self._observer.copies.is_in_steps = True
            self._stepped = self._opening.epoch
            least = min_share_samples(training.model)
            return SyncEpoch(*common, reducer, least, self._hooks())
        sync = self._synchroniser.windows
        assert sync is not None
        sync.rebase()
        self._observer.schedulers.begin_windows()
        self._observer.copies.begin_epoch(*self._copy_ratio(part))
        loop = WindowLoop(
            self._batch_cost, overlapped=sync.is_overlapped, reduced=part.window - 1
        )
        return WindowEpoch(*common, sync, loop, self._hooks())

    def _copy_ratio(self, part: EpochPart) -> tuple[int, int]:
        """Steps and samples of this epoch's windows, which pace updates of copies.

        The same in all parts of the epoch; the first part may have been of steps.
        """
        if self._windowed != self._opening.epoch:
            self._windowed, sizes = self._opening.epoch, part.sizes
            self._ratio = self._observer.steps.of_epoch, sizes.num_samples
            if self._stepped == self._opening.epoch:
                left = part.positions.sizes.num_samples
                done = sizes.batches_in(sizes.num_samples - left)  # a tail is a step
                self._ratio = round(self._observer.steps.of_epoch - done), left
        return self._ratio

    def _hooks(self) -> EpochHooks:
        observer, opening = self._observer, self._opening
        is_sync = self._training.config.policy == "sync"
        return EpochHooks(
            on_error=self._keep_error,
            check=self._synchroniser.check if is_sync else self._check,
            parameter_norm=self._synchroniser.parameter_norm,
            left_with=lambda: (self.sums.whole(), observer.guard.stepped),
            observer=observer,
            numbers=self._numbers,
            sums=self.sums,
            regrouping=opening.regrouping,
            steps=opening.steps,
        )

    def _check(self) -> None:
        """Refuses changes inside an epoch that windows, or ``auto``, cannot follow."""
        self._synchroniser.check()
        self._observer.schedulers.rates.check(self._observer.optimizers())
        if self._synchroniser.reducer is None:
            self._ask_for_cut()  # also on a rank without batches

    def _keep_error(self, error: ElcheError) -> None:
        if isinstance(error, NonFiniteError):
            error = self._worker.name_samples(error)
        self._pending_error = error


def batches_tracked() -> int:
    """Batches tracked by this process's unsynchronised BatchNorm layers."""
    layers = (o for o in gc.get_objects() if issubclass(type(o), BatchNormBase))
    alone = (each for each in layers if not getattr(each, "spans_ranks", False))
    return sum(int(each.num_batches_tracked or 0) for each in alone)


def refuse_statistics(before: int) -> None:
    """Refuses a first batch without gradients that a BatchNorm layer has tracked."""
    if batches_tracked() > before:
        raise ConfigError(
            "a pass over the ranks' loader without gradients writes BatchNorm "
            "statistics, of this rank's share only: give update_bn the plain "
            "DataLoader, on every rank; before an evaluation call model.eval()"
        )
