"""`elche.epochs`, `elche.save`, `elche.resume`: checkpoints and resumption."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from elche.checkpoint.keeper import CheckpointConfig
from elche.config_checks import check_whole
from elche.errors import ConfigError
from elche.runtime.run import Run
from elche.session.process import process, shutdown


def epochs(count: int) -> Iterator[int]:
    """Yields the numbers of the remaining epochs.

    A fresh run gets all of them. A run resumed inside an epoch gets that epoch first,
    and the loader then yields only its rest::

        for epoch in elche.epochs(10):
            for x, y in loader:
                ...

    With ``elche run --resume`` it resumes. With ``--checkpoint-every`` or
    `elche.save_every` it makes checkpoints by time, inside epochs and between them.
    Every rank calls it.

    Args:
        count: epochs of the whole run.

    Raises:
        ConfigError: ``count`` is invalid, or there is no run and no pipeline.
    """
    check_whole("the number of epochs", count, 0)
    _needs_run("epochs")
    return process.checkpoints.epochs(count)


def save_every(folder: str | Path, *, every_s: float = 600.0, keep: int = 2) -> None:
    """Makes checkpoints by time from now on, inside epochs and between them.

    Every rank calls it, after `elche.setup` and before the first epoch.

    Args:
        folder: checkpoint folder, the same on all ranks.
        every_s: interval between checkpoints (s).
        keep: number of complete checkpoints kept, the newest.

    Raises:
        ConfigError: a setting is wrong, or there is no run.
    """
    _needs_run("save_every")
    config = CheckpointConfig(folder=Path(folder), every_s=every_s, keep=keep)
    process.checkpoints.configure(config)


def register_for_checkpointing(*objects: Any, **named: Any) -> None:
    """Has the state of these objects saved and resumed with the run.

    Any object with ``state_dict()`` and ``load_state_dict()``: a GradScaler, schedulers
    that elche does not follow, optimizers beside those given to `elche.setup`, an EMA
    that is none of ``copies=``, counters of your own. State that moves with the model
    is stored once if ranks share it; other state is stored for each rank. Call it after
    `elche.setup`, on every rank, in the same order.

    Raises:
        ConfigError: an object has no state, or a name is used twice.
    """
    _needs_run("register_for_checkpointing")
    first = process.checkpoints.num_registered
    numbered = {f"object {first + at}": each for at, each in enumerate(objects)}
    process.checkpoints.register({**numbered, **named})


def save(folder: str | Path) -> None:
    """Makes a checkpoint of the run in a folder, for `resume`; every rank calls it.

    Between epochs it is made at once; call it at the end of the epoch's body. Inside a
    loop rank 0's call requests one: it is made a few batches later, where all ranks
    pause with one model. Files are written beside training.

    Args:
        folder: checkpoint folder, the same on all ranks. The two newest are kept.

    Raises:
        ConfigError: there is no run, an object has no state that can be stored, or
            the rest of the epoch is unknown.
    """
    _needs_run("save")
    process.checkpoints.save(Path(folder))


def resume(folder: str | Path) -> bool:
    """Resumes from the newest complete checkpoint in a folder; every rank calls it.

    Call it after `elche.setup` and `register_for_checkpointing`, before the first
    epoch. The number of ranks may differ from the run that saved it.

    Args:
        folder: folder of the checkpoints.

    Returns:
        True if there was a checkpoint; otherwise the run starts fresh.

    Raises:
        ConfigError: there is no run, or an epoch has begun.
        MismatchError: model, optimizer or registered objects differ.
        CheckpointError: another version of elche wrote it.
    """
    _needs_run("resume")
    return process.checkpoints.resume(Path(folder))


def _needs_run(call: str) -> None:
    run = process.run
    has_failed = isinstance(run, Run) and run.worker.is_closed
    if run is not None and not has_failed:
        return
    from elche.pipeline.checkpoints.pipeline_contents import PipelineContents
    from elche.pipeline.checkpoints.pipeline_state import PipelineState

    pipe = PipelineState.only_open()
    if pipe is None:
        if has_failed:
            return  # it says so itself
        raise ConfigError(
            f"elche.{call}() needs a run: call elche.setup first, or make a Pipeline"
        )
    if has_failed:
        shutdown()  # what comes is of the pipeline
    if pipe.passes.pauses is not process.checkpoints:
        process.checkpoints.end_run(has_failed=True)  # of a run that has failed
        process.checkpoints.begin_saved(pipe, partial(PipelineContents, pipe))
        pipe.passes.pauses = process.checkpoints
        pipe.end_with(process.checkpoints.end_run)
