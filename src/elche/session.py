"""`elche.setup`: shared training with the user's own loop.

One run at a time per process. On one device nothing is wrapped, hooked or started.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from elche.by_hand.manual_run import current_manual_run, end_manual_run
from elche.comm.tensors.kept_memory import keep_freed_memory
from elche.config import DELAYED_SYNC, RunConfig
from elche.errors import ConfigError, ElcheError
from elche.process import process
from elche.runtime.data.batch_weights import BatchWeights, WeightOf
from elche.runtime.data.stream_data import StreamView, by_position
from elche.runtime.emulation import EmulationHandle, emulate
from elche.runtime.loader import RunLoader, check_unstarted
from elche.runtime.memory_limits import memory_hint
from elche.runtime.process.environment import Placement, read_placement
from elche.runtime.process.launcher_watch import watch_launcher
from elche.runtime.process.shutdown import (
    counted_hint,
    exit_watch,
    failure_of,
    watch_process,
)
from elche.runtime.rank_settings import (
    batch_norm_hint,
    check_shared,
    check_training,
    fused_hint,
    optimizers_of,
)
from elche.runtime.report.run_summary import RunFacts
from elche.runtime.run import Run
from elche.runtime.single import SingleRun
from elche.runtime.training import SetupConfig, Training
from elche.runtime.watch.model_copies import check_copies
from elche.session_config import names_no_policy, run_config

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar(
    "Optimizer", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
)


def setup(
    model: Model,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    config: RunConfig | None = None,
    epochs: int | None = None,
    samples_per_epoch: int | None = None,
    weight_of: WeightOf | None = None,
    schedulers: Sequence[LRScheduler] = (),
    copies: Sequence[nn.Module] = (),
    **options: Any,
) -> tuple[Model, Optimizer, Any]:
    """Shares the training of ``model`` among the ranks of this run.

    The loop below it stays plain PyTorch; the loss is the mean over the batch (or with
    ``loss_reduction="sum"`` the sum), and its backward runs before the next batch is
    asked for, or under ``sync`` after that, once for each batch. On one device nothing
    changes but
    the placement: the model is moved to the device, the loader moves batches there. On
    several, parameters and buffers are broadcast from rank 0, and the loader hands out
    this rank's share of the data: each sample once, on one rank. Only of a batch with
    fewer samples than ranks (than two for each with BatchNorm layers) some ranks are
    handed samples of others under ``sync``, with `elche.batch_weight` being 0.

    Args:
        model: the model; the same on every rank.
        optimizer: its optimizer, or several in a list, such as Muon for the matrices
            and AdamW for the rest, each of which the loop steps in every batch.
        loader: a DataLoader. Its ``batch_size`` is the global batch under every
            policy: a local step of a window takes its part by the number of ranks
            (or ``local_batch_size``). Every process of several ranks that loads (each
            rank, or each of its workers) reads all of an
            IterableDataset and keeps its part. That is exact, every sample
            once per epoch, as long as the stream yields the same samples in the same
            order in every process. It does if it draws from Python's, torch's or
            numpy's global generators, which are seeded at every sample; its own
            generators it must seed alike everywhere, and it must not divide itself
            by rank or in ``worker_init_fn``. The first samples are compared.
        config: the settings as one value; or give them as options.
        epochs: how many epochs the loop will run, if known. ``policy="auto"`` expects
            ten otherwise: windows pay less the shorter the run.
        samples_per_epoch: samples of an epoch of an IterableDataset (whole batches
            with ``batch_size=None``); what it yields beyond is left. None for its
            ``len()``, which several ranks need.
        weight_of: what a batch weighs beside those of other ranks, where its samples do
            not say it: what the loss is a mean over, such as the tokens that are not
            padding, as in ``weight_of=lambda batch: (batch["labels"] != -100).sum()``.
            Called with each batch as the loader makes it, before it is moved, and with
            parts of one, on one device as on several; it returns one number (of Python,
            torch or numpy), 0 for a batch that is to count nowhere.
            Means of gradients and what is logged are weighted by it; under ``cadence``
            and ``async`` ranks whose batches weigh 0 are left out. Samples stay what is
            counted, shared out and scheduled by. With ``loss_reduction="sum"`` it only
            leaves out what weighs 0.
        schedulers: learning rate schedulers; see `elche.follow`.
        copies: of the model, which the loop updates (EMA). They matter under windows,
            where each rank's loop sees other batches. A `torch.optim.swa_utils.
            AveragedModel` is recognised by itself, and needs this only where ``auto``
            may leave its rank out; its updates follow the run's global batches, and are
            made when a window is committed. Another module becomes its mean over the
            ranks at each epoch's end.
        **options: fields of `elche.RunConfig`, such as ``policy="cadence"``.

    Returns:
        The same model and optimizer, and the loader to iterate over.

    Raises:
        ConfigError: an argument is wrong, or cannot be trained on several ranks.
        MismatchError: ranks disagree about model, data or settings.
        RemoteRankError: another rank failed meanwhile.
        CommunicationError: the ranks did not come together; `DeadlineError` where that
            took longer than ``timeout_s``.

    Asking the loader for a batch or an epoch raises these as well (ConfigError where
    ``weight_of`` fails or returns what is no weight, naming rank and batch), and
    NonFiniteError where what a rank learned was not finite again (see
    `elche.RunConfig.non_finite`).
    An error that is met when the loop is left by ``break`` is raised at the next call.
    """
    asked = SetupConfig(
        config=run_config(config, options),
        epochs=epochs,
        samples_per_epoch=samples_per_epoch,
        weight_of=weight_of,
        schedulers=schedulers,
        copies=tuple(copies),
        is_default=names_no_policy(config, options),
    )
    return set_up(model, optimizer, loader, asked)


def set_up(
    model: Model, optimizer: Optimizer, loader: DataLoader[Any], asked: SetupConfig
) -> tuple[Model, Optimizer, Any]:
    """What :func:`setup` does, with its arguments as one value."""
    if asked.config.policy == DELAYED_SYNC:
        raise ConfigError(
            "policy 'delayed_sync' takes the loop's steps later, so it needs a loop of "
            "elche's own: use elche.Trainer, or choose policy='sync'"
        )
    optimizers = optimizers_of(optimizer)
    check_training(model, optimizers, loader)
    check_copies(asked.copies, model)
    shutdown()
    placement = read_placement()
    process.placement = placement
    watch_launcher(placement.rank)
    training = _place(model, optimizers, loader, asked, placement)
    run: Run | SingleRun
    if placement.is_alone:
        run = _begin_alone(training, asked, placement)
    else:
        check_shared(model, optimizers, training.loader, asked.config)
        check_unstarted(loader)
        _watch_process()
        run = _begin_shared(training, asked, placement)
    return model, optimizer, RunLoader(loader, training.loader, run)


def _place(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loader: DataLoader[Any],
    asked: SetupConfig,
    placement: Placement,
) -> Training:
    """Moves the model to this rank's device, and makes the loader's positions."""
    of_batch = asked.weight_of
    weights = None if of_batch is None else BatchWeights(of_batch, placement.rank)
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)
    model.to(placement.device)
    if placement.emulation is not None:
        process.emulation = emulate(model, placement.emulation)
    world_size, seed = placement.world_size, asked.config.seed
    return Training(
        config=asked.config,
        model=model,
        optimizers=optimizers,
        loader=by_position(loader, asked.samples_per_epoch, world_size, seed),
        weights=weights,
        micro_batches=asked.micro_batches,
        copies=asked.copies,
        is_default=asked.is_default,
        epochs=asked.epochs,
        pauses=process.checkpoints,
        delayed=asked.delayed,
    )


def _begin_alone(
    training: Training, asked: SetupConfig, placement: Placement
) -> SingleRun:
    _write_stderr(_single_line(placement))
    keep_freed_memory()
    run = SingleRun(training, placement.device)
    run.notifications.emit = _write_stderr
    run.attach()
    process.begin(run, _facts_alone(placement, asked), run.timeline)
    process.checkpoints.begin_run(run, asked.schedulers, asked.stops)
    process.checkpoints.register(_named(training.optimizers[1:]))
    atexit.unregister(shutdown)
    atexit.register(shutdown)  # a checkpoint may still be written then, or a trace
    return run


def _begin_shared(training: Training, asked: SetupConfig, placement: Placement) -> Run:
    config, dataset = asked.config, training.loader.dataset
    run = Run.start(placement, training, asked.epochs)
    process.begin(run, run.facts(), run.worker.timeline)
    process.checkpoints.begin_run(
        run,
        asked.schedulers,
        asked.stops,
        cuts_at_stop=asked.delayed is not None,
    )
    process.checkpoints.register(_named(training.optimizers[1:]))
    for scheduler in asked.schedulers:
        run.follow(scheduler)
    if isinstance(dataset, StreamView):
        seed = torch.initial_seed() if config.seed is None else config.seed
        dataset.join(run.worker.group, seed)
    run.notifications.emit = _write_if_first
    if placement.rank == 0:
        _write_stderr(run.headline())
        fused = [fused_hint(each) for each in training.optimizers]
        for hint in (batch_norm_hint(training.model, config.policy), *fused):
            if hint:
                _write_stderr(hint)
    return run


def _named(
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[str, torch.optim.Optimizer]:
    """Optimizers beside the main one, by their names in a checkpoint."""
    return {f"optimizer {index}": each for index, each in enumerate(optimizers, 2)}


def rank() -> int:
    """This process's rank; 0 in a run of one.

    Where ranks have died and the others go on, its place among these.
    """
    run = current_run()
    if run is not None:
        return run.rank
    return _placement().rank if process.place is None else process.place


def world_size() -> int:
    """Number of ranks; 1 in a plain script. Ranks that have died do not count."""
    run = current_run()
    return _placement().world_size if run is None else run.world_size


def is_main_process() -> bool:
    """Whether this is rank 0, which should print and save: `rank` says who that is."""
    return rank() == 0


def device() -> torch.device:
    """The device that this rank trains on."""
    return _placement().device


def barrier() -> None:
    """Waits until every rank has come here; returns at once in a run of one.

    Raises:
        RemoteRankError: another rank failed meanwhile.
        NonFiniteError: the run had ended for that, which a ``break`` could not say.
        CommunicationError: a rank is gone; `DeadlineError` where one did not come
            within ``timeout_s``.
        ConfigError: there is no run yet, or this is the inside of a loop under
            ``cadence``, where ranks run different numbers of batches.
    """
    if world_size() == 1:
        return
    run, by_hand = current_run(), current_manual_run()
    if run is None and by_hand is not None:
        by_hand.barrier()
        return
    if run is None:
        raise ConfigError(
            "elche.barrier() needs a run: call elche.setup or elche.init_group first"
        )
    run.barrier("elche.barrier()")


def current_run() -> Run | None:
    """The run under way on several ranks, None on one."""
    return process.run if isinstance(process.run, Run) else None


def current_emulation() -> EmulationHandle | None:
    """The emulated device that `setup` attached, None for a real one."""
    return process.emulation


def shutdown() -> None:
    """Ends the run of this process: leaves, and closes group and channel.

    Called at the exit of the interpreter and by the next `setup`. Ends the group of
    `elche.init_group` too.

    Raises:
        ConfigError: a `TrainingHandle`'s thread trains.
    """
    refuse_beside()
    end_manual_run()
    run, process.run = process.run, None
    try:
        process.checkpoints.end_run(has_failed=run is None)
        if run is not None:
            if run.rank != _placement().rank:
                process.place = run.rank
            run.leave()
    finally:
        emulation, process.emulation = process.emulation, None
        if emulation is not None:
            emulation.remove()
        process.end()
        process.placement = None


def refuse_beside() -> None:
    """Refuses another run beside one in a thread.

    Raises:
        ConfigError: a `TrainingHandle`'s thread trains.
    """
    if process.trains_beside():
        raise ConfigError(
            "a Trainer trains in a thread of this process, one run at a time; call "
            "its handle's join() or stop() first"
        )


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Tells the other ranks about an exception that leaves the block."""
    try:
        yield
    except BaseException as error:
        _tell_failure(error)
        raise


def _placement() -> Placement:
    if process.placement is None:
        return read_placement()
    return process.placement


def _facts_alone(placement: Placement, asked: SetupConfig) -> RunFacts:
    return RunFacts(
        policy=asked.config.policy,
        is_default=asked.is_default,
        devices=(placement.device_name,),
        memory_bytes=(placement.memory_bytes,),
        transport="none, on one device",
        reduction_bytes=0,
    )


def _single_line(placement: Placement) -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if placement.speed is None and placement.device.type == "cpu":
        return "elche: CPU"
    line = f"elche: single device: {placement.device_name}"
    if count > 1 and "ELCHE_COORDINATOR" not in os.environ:
        line += f" ({count} devices are here; use all of them: elche run script.py)"
    return line


def _write_stderr(line: str) -> None:
    """Writes a line to stderr regardless of logging configuration."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _write_if_first(line: str) -> None:
    """A line for the user, on the first rank that lives."""
    if rank() == 0:
        _write_stderr(line)
    else:
        logger.info(line)


def _watch_process() -> None:
    """Leaves cleanly at exit, and tells the others about an uncaught exception."""
    if process.hooked:
        return
    process.hooked = True
    exit_watch.attach()
    watch_process(_tell_failure, shutdown)


def _tell_failure(error: BaseException) -> None:
    run = current_run()
    if process.trains_beside():  # it ends when it is told, and closes everything
        if run is not None:
            with contextlib.suppress(ElcheError):
                run.worker.send(failure_of(run.worker.rank, error))
        return
    if process.metrics is not None:
        process.metrics.end()
    if run is None:
        return
    process.run = None
    hint = memory_hint(error, run.worker.rank, run.last_samples)
    hint = hint or counted_hint(error, run.policy)
    if hint:
        _write_stderr(f"elche: {hint}")
    with contextlib.suppress(ElcheError):
        run.close(failure_of(run.worker.rank, error, hint))
