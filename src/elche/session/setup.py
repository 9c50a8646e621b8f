"""`elche.setup`: shared training with the user's own loop.

One run at a time per process. On one device nothing is wrapped, hooked or started.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import Unpack

from elche.comm.tensors.kept_memory import keep_freed_memory
from elche.config import RunConfig
from elche.devices import choice
from elche.errors import ConfigError
from elche.runtime.data.batch_weights import BatchWeights, WeightOf
from elche.runtime.data.stream_data import StreamView, by_position
from elche.runtime.data.transfer import to_device
from elche.runtime.emulation import emulate
from elche.runtime.loader import RunLoader, check_unstarted
from elche.runtime.process.environment import Placement, read_placement
from elche.runtime.process.launcher_watch import watch_launcher
from elche.runtime.rank_settings import (
    batch_norm_hint,
    check_shared,
    check_training,
    optimizers_of,
)
from elche.runtime.report.run_summary import RunFacts
from elche.runtime.run import Run
from elche.runtime.single import SingleRun
from elche.runtime.training import SetupConfig, Training
from elche.runtime.watch.model_copies import check_copies
from elche.session.options import SetupOptions, names_no_policy, run_config
from elche.session.process import (
    process,
    shutdown,
    watch_exit,
    write_line,
    write_on_first,
)
from elche.torch_internals.held import has_hooks

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
    **options: Unpack[SetupOptions],
) -> tuple[Model, Optimizer, RunLoader]:
    """Shares the training of ``model`` among the ranks of this run.

    The loop stays plain PyTorch (docs/loops.md). On one device model and batches are
    moved to it. On several, parameters and buffers are broadcast from rank 0, and the
    loader yields this rank's share of the data: each sample once, on one rank.

    Args:
        model: the model; the same on every rank.
        optimizer: its optimizer, or several in a list, all stepped in every batch.
        loader: a DataLoader. Its ``batch_size`` is the global batch under every policy.
            Every loading process reads all of an IterableDataset (docs/data.md).
        config: the settings as one value; or give them as options.
        epochs: number of epochs that the loop will run, if known; ``policy="auto"``
            expects ten otherwise.
        samples_per_epoch: samples of an epoch of an IterableDataset; None for its
            ``len()``, which several ranks need.
        weight_of: weight of a batch, if not its samples: the count that the loss is a
            mean over, such as ``lambda batch: (batch["labels"] != -100).sum()``.
        schedulers: learning rate schedulers; see `elche.follow`.
        copies: copies of the model that the loop updates (EMA); windows need them.
        **options: fields of `elche.RunConfig`, such as ``policy="cadence"``.

    Returns:
        The same model and optimizer, and the loader to iterate over.

    Raises:
        ConfigError: an argument is wrong, or cannot be trained on several ranks.
        MismatchError: ranks disagree about model, data or settings.
        RemoteRankError: another rank failed meanwhile; the loader raises these as well.
        CommunicationError: the ranks did not connect within ``timeout_s``.
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
) -> tuple[Model, Optimizer, RunLoader]:
    """Implementation of `elche.setup`; ``asked`` holds its settings."""
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
        watch_exit()
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
    choice.use(placement.device)
    move_model(model, placement.device, optimizers)
    _move_state(optimizers)
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
    )


def move_model(
    model: nn.Module,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> None:
    """Moves a model in place; its parameters stay the objects that optimizers hold.

    If `Module.to` would make new parameters (devices of extensions, XLA, or a switch of
    `torch.__future__`), contents are swapped instead, unless the model is on the device
    already.

    Raises:
        ConfigError: a parameter became another object, or would lose its hooks. A
            frozen parameter without an optimizer may become another object.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    probe = nn.ParameterList([nn.Parameter(torch.empty(0, device="cpu"))])
    kept, swaps = probe[0], torch.__future__.get_swap_module_params_on_conversion()
    needs_swaps, error = probe.to(device)[0] is not kept, None
    tensors = [*before.values(), *model.buffers()]
    if needs_swaps and all(each.device == device for each in tensors):
        return
    hooked = [name for name, each in before.items() if has_hooks(each)]
    if needs_swaps and hooked:
        raise ConfigError(
            f"moving the model to {device} would drop the hooks of its parameters "
            f"({', '.join(hooked[:3])}); call model.to(elche.device()) before you "
            "register them and build the optimizer"
        )
    attributes = [(each, dict(vars(each))) for each in before.values()]
    torch.__future__.set_swap_module_params_on_conversion(swaps or needs_swaps)
    try:
        model.to(device)
    except RuntimeError as failed:
        if not needs_swaps or "swap" not in str(failed):
            raise
        error = failed  # as where something holds a weak reference to a parameter
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    for each, own in attributes:  # a swap takes them along
        vars(each).update({**own, **vars(each)})
    after = dict(model.named_parameters(remove_duplicate=False))
    groups = [group for each in optimizers for group in each.param_groups]
    held = {id(each) for group in groups for each in group["params"]}
    others = [
        name
        for name in after
        if (was := before.get(name)) is not after[name]
        and (was is None or was.requires_grad or id(was) in held)
    ]
    if error is not None or others:
        raise ConfigError(
            f"moving the model to {device} would make other objects of its parameters "
            f"({', '.join(others[:3]) or error}), which the optimizer does not hold; "
            "call model.to(elche.device()) before you build the optimizer"
        ) from error


def _move_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Moves state that was loaded before the model was moved to its parameters.

    Step counts stay on the host, unless the optimizer computes with them on the device.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            moves_steps = group.get("fused") or group.get("capturable")
            for each in group["params"]:
                state = optimizer.state.get(each, {})
                near = {k: v for k, v in state.items() if k != "step" or moves_steps}
                state.update(to_device(near, each.device))


def _begin_alone(
    training: Training, asked: SetupConfig, placement: Placement
) -> SingleRun:
    write_line(_single_line(placement))
    keep_freed_memory()
    run = SingleRun(training, placement.device)
    run.notifications.emit = write_line
    run.attach()
    facts = RunFacts(
        policy=asked.config.policy,
        is_default=asked.is_default,
        devices=(placement.device_name,),
        memory_bytes=(placement.memory_bytes,),
        transport="none, on one device",
        reduction_bytes=0,
    )
    process.begin(run, facts, run.timeline)
    _begin_checkpoints(run, training, asked)
    atexit.unregister(shutdown)
    atexit.register(shutdown)  # a checkpoint may still be written then, or a trace
    return run


def _begin_shared(training: Training, asked: SetupConfig, placement: Placement) -> Run:
    config, dataset = asked.config, training.loader.dataset
    run = Run.start(placement, training, asked.epochs)
    process.begin(run, run.facts(), run.worker.timeline)
    _begin_checkpoints(run, training, asked)
    for scheduler in asked.schedulers:
        run.follow(scheduler)
    if isinstance(dataset, StreamView):
        seed = torch.initial_seed() if config.seed is None else config.seed
        dataset.elche_reader.join(run.worker.group, seed)
    run.notifications.emit = partial(write_on_first, run.worker)
    if placement.rank == 0:
        write_line(run.headline())
        if hint := batch_norm_hint(training.model, config.policy):
            write_line(hint)
    return run


def _begin_checkpoints(
    run: Run | SingleRun, training: Training, asked: SetupConfig
) -> None:
    keeper = process.checkpoints
    keeper.begin_run(run, asked.schedulers, asked.stops)
    others = enumerate(training.optimizers[1:], 2)
    keeper.register({f"optimizer {index}": each for index, each in others})


def _single_line(placement: Placement) -> str:
    count = choice.count()
    if placement.emulation is None and placement.device.type == "cpu":
        return "elche: CPU"
    line = f"elche: single device: {placement.device_name}"
    if count > 1 and "ELCHE_COORDINATOR" not in os.environ:
        line += f" ({count} devices are here; use all of them: elche run script.py)"
    return line
