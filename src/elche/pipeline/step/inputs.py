"""Inputs of a step or an evaluation: read, checked and cut.

Before anything runs, each rank reads its own part and reports it to the others. So an
error in one part is raised on all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from elche.errors import ConfigError, named_ranks
from elche.pipeline.cutting.own_loss import OwnLoss
from elche.pipeline.peers.communicator import common
from elche.pipeline.replicas.replica_groups import ReplicaGroups
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.step.microbatches import Given, Microbatches
from elche.pipeline.step.outputs import microbatch_sizes
from elche.pipeline.trees import as_tensors, batch_samples, map_tensors
from elche.runtime.data.stream_reader import fingerprint

COMPARED_STEPS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """The script's call of `step`, `evaluate` or `generate`.

    Has the arguments of `elche.pipeline.Pipeline.step`.

    Attributes:
        what: name of the method.
        make_batch: function that makes the batch on the rank that reads it; its errors
            are reported to the other ranks.
    """

    what: str
    batch: Any = None
    target: Any = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float = 1.0
    input_gradients: bool = False
    outputs: Any = None
    make_batch: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class InputReport:
    """A rank's report to the others about its part of a call.

    Attributes:
        samples: number of the batch's samples, on the rank that reads it.
        targets: number of the target's samples, on the rank that reads it; -1 if
            unknown.
        loss_scale: loss scale of the call.
        keywords: for each given keyword, whether a layer of the rank may accept it.
        outputs: ranks that receive the outputs; None for none.
        batch: fingerprint of the given batch, only in the first steps.
        omitted: arguments of the model that the sample has and the batch omits.
        weights: see `elche.pipeline.step.microbatches.Microbatches.weigh`.
        is_uneven: see `Microbatches.weigh`.
        shapes: see `Microbatches.shapes`.
    """

    samples: int | None = None
    targets: int | None = None
    loss_scale: float = 1.0
    keywords: Mapping[str, bool] = field(default_factory=dict)
    outputs: int | str | None = None
    batch: int | None = None
    omitted: Sequence[str] = ()
    weights: Sequence[float] | None = None
    is_uneven: bool = False
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)


def _part(call: Call, cutter: Microbatches, groups: ReplicaGroups, rank: int) -> Call:
    """This replica's part of a call whose batch is that of all replicas."""
    roles = {"batch": call.batch, "target": call.target, "keywords": call.keywords}
    given = {
        role: as_tensors(one, f"the {role} on rank {rank}", is_cut=False)
        for role, one in roles.items()
    }
    samples, labelled = batch_samples(given["batch"]), batch_samples(given["target"])
    if samples is None:
        raise ConfigError(
            f"split_batches=True needs the batch of all replicas on every rank, and "
            f"{call.what} was given none on rank {rank}"
        )
    cutter.learn([cutter.shapes(given)], checks_names=False)
    sizes = microbatch_sizes(samples, labelled, len(groups.ranks))
    if groups.index >= len(sizes):
        return replace(call, batch=None, target=None, keywords={})
    cut = {role: cutter.split(one, role, sizes) for role, one in given.items()}
    return replace(call, **{role: one[groups.index] for role, one in cut.items()})


def read_call(
    call: Call,
    parts: Parts,
    cutter: Microbatches,
    groups: ReplicaGroups,
    compares: bool,
) -> tuple[InputReport, Given]:
    """Reads this rank's part of a call; returns the report of it, and the values.

    This replica may have no batch while others have one. The values are on this rank's
    device.
    """
    what, rank, may_rest = call.what, parts.rank, groups.are_several
    splits, whole = may_rest and parts.given.config.split_batches, call.batch
    if splits:
        call = _part(call, cutter, groups, rank)
    if what == "step" and not torch.is_grad_enabled():
        raise ConfigError(
            f"step runs under torch.no_grad() or inference_mode() on rank {rank}, "
            "where there are no gradients; call it outside, or call evaluate"
        )
    loss_scale = scale_of(call.loss_scale)
    batch = target = samples = targets = None
    omitted: list[str] = []
    if parts.is_first:
        batch, omitted = _read_batch(call, parts, may_rest)
        samples = batch_samples(batch)
    is_own = isinstance(parts.given.loss_fn, OwnLoss)
    if is_own and call.target is not None:
        raise ConfigError(
            f"{what} was given a target on rank {rank}, but loss_fn=None uses the "
            "model's own loss; give the labels in the batch alone"
        )
    if parts.is_last and call.target is not None:
        target = as_tensors(call.target, f"the target on rank {rank}")
        targets = batch_samples(target)
        targets = -1 if targets is None else targets
    elif parts.is_last and what == "step" and not (may_rest or is_own):
        raise ConfigError(
            f"step needs a target on rank {rank}, which has the last stage"
        )

    def here(value: Any) -> Any:
        return map_tensors(value, lambda tensor: tensor.to(parts.given.device))

    keywords = {
        name: as_tensors(one, f"keyword {name} on rank {rank}", is_cut=False)
        for name, one in call.keywords.items()
    }
    stages = [one.stage for one in parts.stages.values()]
    takes = {name: any(one.takes(name) for one in stages) for name in keywords}
    shown = None
    if compares and (splits or parts.is_first or parts.is_last) and whole is not None:
        shown = fingerprint(whole)
    given = {"batch": batch, "target": target, "keywords": keywords}
    taken = {name: one for name, one in keywords.items() if takes[name]}
    weighed = (None, False) if what == "generate" else cutter.weigh(given)
    report = InputReport(
        *(samples, targets, loss_scale, takes, call.outputs, shown, omitted),
        *(*weighed, cutter.shapes({**given, "keywords": taken})),
    )
    return report, {role: here(one) for role, one in given.items()}


def _read_batch(call: Call, parts: Parts, may_rest: bool) -> tuple[Any, list[str]]:
    """Returns the first stage's batch, and names of arguments missing from it."""
    what, rank = call.what, parts.rank
    given = call.batch if call.make_batch is None else call.make_batch()
    batch = as_tensors(given, f"the batch on rank {rank}")
    if batch_samples(batch) is None and not (may_rest and batch is None):
        raise ConfigError(
            f"{what} needs a batch on rank {rank}, which has the first stage: "
            "expected a tensor with samples along its first dimension, got "
            f"{type(batch).__name__}"
        )
    omitted = parts.omitted_by(batch, call.keywords)
    if omitted and what == "step":
        raise ConfigError(
            f"the batch of step lacks the model's argument {omitted[0]}, which the "
            "sample has; give it, or cut with a sample without it (evaluate and "
            "generate run without it)"
        )
    return batch, omitted


def scale_of(loss_scale: Any) -> float:
    """Returns a loss scale as a float; raises ConfigError unless finite and above 0."""
    found = number_of(loss_scale, "loss_scale")
    if not 0 < found < math.inf:
        raise ConfigError(f"expected a finite loss_scale above 0, got {loss_scale!r}")
    return found


def number_of(value: Any, name: str) -> float:
    """Returns a number or one-element tensor as a float; else raises ConfigError."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"expected a number as {name}, got {value!r}") from None


def check_reports(
    what: str,
    reports: Sequence[InputReport],
    named: Sequence[Collection[str]],
    groups: ReplicaGroups,
) -> Sequence[str]:
    """Compares the reports of all ranks; raises the same error on all of them.

    Returns:
        The model's arguments that the batches omit.
    """
    common([one.loss_scale for one in reports], "loss_scale")
    wanted = common([one.outputs for one in reports], "choice of outputs")
    known = (None, "last", "all", *range(len(reports)))
    if wanted not in known or isinstance(wanted, bool):
        raise ConfigError(
            f"expected outputs= of 'last', 'all' or a rank below {len(reports)}, got "
            f"{wanted!r}"
        )
    for members in groups.ranks:
        for name in sorted({key for rank in members for key in reports[rank].keywords}):
            have = [rank for rank in members if name in reports[rank].keywords]
            if not any(reports[rank].keywords[name] for rank in have):
                raise ConfigError(
                    f"no layer of {named_ranks(have)} takes the keyword {name!r} that "
                    f"{what} was given there; check its name, and give it "
                    "on every rank whose layers take it"
                )
            lack = [r for r in members if r not in have and name in named[r]]
            if lack:  # one process would pass the keyword to all layers that name it
                raise ConfigError(
                    f"{what} was given the keyword {name!r} on "
                    f"{named_ranks(have)}, but not on {named_ranks(lack)}, whose "
                    "layers take it, too; give it on all of them"
                )
    omitted = [list(one.omitted) for one in reports if one.samples is not None]
    return common(omitted or [[]], "choice of the arguments that a batch omits")


def warn_of_other_batch(
    reports: Sequence[InputReport], parts: Parts, groups: ReplicaGroups
) -> None:
    """Warns if the first and the last stage's rank were given different batches.

    If loaders shuffle differently on the two ranks, training silently uses wrong pairs.
    This is only a warning, because augmentation may differ between ranks with the same
    samples.
    """
    if parts.given.config.split_batches and groups.are_several:
        other = [r for r, one in enumerate(reports) if one.batch != reports[0].batch]
        if other and parts.rank == 0:
            logger.warning(
                "%s and rank 0 were given different batches, and each replica cuts its "
                "part from its own (split_batches=True): samples may count twice or "
                "never; seed the sampler alike on all ranks (generator=)",
                named_ranks(other),
            )
        return
    placement = parts.plan.schedule.placement
    first, last = placement[0], placement[-1]
    read, seen = reports[first].batch, reports[last].batch
    if parts.is_last and None not in (read, seen) and read != seen:
        logger.warning(
            "rank %d, which reads the batch, was given another batch than rank %d, "
            "which reads the target: input and target may belong to different samples; "
            "seed the sampler alike on all ranks (generator=), or pass each rank only "
            "what it reads",
            first,
            last,
        )
