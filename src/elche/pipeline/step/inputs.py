"""Inputs of a step or an evaluation: read, checked and cut.

Each rank reads its own part and reports it to the others before anything runs, so
that an error in one part is raised on all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from elche.errors import ConfigError, MismatchError
from elche.pipeline.replicas.replica_groups import ReplicaGroups
from elche.pipeline.setup.assembly import Parts
from elche.pipeline.trees import as_tensors, batch_samples, map_tensors, split_batch
from elche.runtime.data.stream_reader import fingerprint

COMPARED_STEPS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """The script's call of `step` or `evaluate`.

    Attributes:
        what: name of the method.
        batch: see `elche.pipeline.Pipeline.step`.
        target: see there.
        keywords: see there.
        loss_scale: see there.
        input_gradients: see there.
        outputs: see `elche.pipeline.Pipeline.evaluate`.
        make_batch: makes the batch on the rank that reads it; an error is reported to
            the other ranks.
    """

    what: str
    batch: Any = None
    target: Any = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float = 1.0
    input_gradients: bool = False
    outputs: Any = "last"
    make_batch: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class InputReport:
    """A rank's report to the others about its part of a call.

    Attributes:
        what: name of the method.
        error: error text, or "".
        samples: samples of the batch, on the rank that reads it.
        targets: samples of the target, on the rank that reads it; -1 if they cannot be
            counted.
        loss_scale: loss scale of the call.
        keywords: whether a layer of the rank may accept each given keyword, by name.
        outputs: ranks that receive the outputs.
        batch: fingerprint of the given batch, in the first steps.
    """

    what: str
    error: str = ""
    samples: int | None = None
    targets: int | None = None
    loss_scale: float = 1.0
    keywords: Mapping[str, bool] = field(default_factory=dict)
    outputs: int | str = "last"
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class LocalInput:
    """This rank's own part of a call.

    Attributes:
        report: report for the other ranks.
        batch: batch on the device; None if this rank does not read it.
        target: target on the device; likewise.
        keywords: keywords on the device.
        raised: error while reading the input.
    """

    report: InputReport
    batch: Any = None
    target: Any = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    raised: Exception | None = None


def part_of_call(call: Call, index: int, count: int) -> Call:
    """One replica's part of a call that was given the batch of all replicas."""
    given = (call.batch, call.target, dict(call.keywords))
    samples = next(filter(None, map(batch_samples, given)), None)
    if samples is None:
        return call
    sizes = [samples // count + (place < samples % count) for place in range(count)]
    if not sizes[index]:
        return replace(call, batch=None, target=None, keywords={})
    batch, target, keywords = (split_batch(one, sizes)[index] for one in given)
    return replace(call, batch=batch, target=target, keywords=keywords)


def read_call(
    call: Call, parts: Parts, may_rest: bool, trouble: str, compares: bool
) -> LocalInput:
    """Reads the part of a call that this rank needs; never raises.

    Args:
        call: the script's call.
        parts: this rank's stages and plan.
        may_rest: whether the batch may be missing, because other replicas may have one.
        trouble: error of the rank itself, or "".
        compares: whether to report the batch's fingerprint.
    """
    try:
        if trouble:
            raise ConfigError(trouble)
        return _read(call, parts, may_rest, compares)
    except Exception as error:
        name = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        text = f"{name}{error}" or type(error).__name__
        return LocalInput(InputReport(call.what, text), raised=error)


def _read(call: Call, parts: Parts, may_rest: bool, compares: bool) -> LocalInput:
    what, rank = call.what, parts.rank
    if what == "step" and not torch.is_grad_enabled():
        raise ConfigError(
            f"step runs under torch.no_grad() or inference_mode() on rank {rank}, "
            "where there are no gradients; call it outside, or call evaluate"
        )
    loss_scale = scale_of(call.loss_scale)
    batch = target = samples = targets = None
    if parts.is_first:
        given = call.batch if call.make_batch is None else call.make_batch()
        batch = as_tensors(given, f"the batch on rank {rank}")
        samples = batch_samples(batch)
        if samples is None and not (may_rest and batch is None):
            raise ConfigError(
                f"{what} needs a batch on rank {rank}, which has the first stage: "
                "expected a tensor with samples along its first dimension, got "
                f"{type(batch).__name__}"
            )
    if parts.is_last and call.target is not None:
        target = as_tensors(call.target, f"the target on rank {rank}")
        targets = batch_samples(target)
        targets = -1 if targets is None else targets
    elif parts.is_last and what == "step" and not may_rest:
        raise ConfigError(
            f"step needs a target on rank {rank}, which has the last stage"
        )

    def here(value: Any) -> Any:
        return map_tensors(value, lambda tensor: tensor.to(parts.given.device))

    keywords = {
        name: here(as_tensors(one, f"keyword {name} on rank {rank}", is_cut=False))
        for name, one in call.keywords.items()
    }
    stages = [one.stage for one in parts.stages.values()]
    takes = {name: any(one.takes(name) for one in stages) for name in keywords}
    shown = None
    if compares and (parts.is_first or parts.is_last) and call.batch is not None:
        shown = fingerprint(call.batch)
    report = InputReport(
        *(what, "", samples, targets, loss_scale, takes, call.outputs, shown)
    )
    return LocalInput(report, here(batch), here(target), keywords)


def scale_of(loss_scale: Any) -> float:
    """Checks a loss scale and returns it as a float.

    Raises:
        ConfigError: the scale is not a number, or not finite and above 0.
    """
    found = number_of(loss_scale, "loss_scale")
    if not 0 < found < math.inf:
        raise ConfigError(f"expected a finite loss_scale above 0, got {loss_scale!r}")
    return found


def number_of(value: Any, name: str) -> float:
    """Returns a number, which may be given as a tensor, as a float.

    Raises:
        ConfigError: the value is not a number.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"expected a number as {name}, got {value!r}") from None


def check_reports(
    reports: Sequence[InputReport],
    named: Sequence[Collection[str]],
    groups: ReplicaGroups,
) -> None:
    """Compares the reports of all ranks; raises the same error on all of them.

    Args:
        reports: reports by rank.
        named: keywords that the layers name, by rank.
        groups: the replicas.

    Raises:
        ConfigError: a rank's part is wrong; no layer accepts a keyword where it was
            given; a rank whose layers name a keyword was not given it; or outputs are
            requested on a rank that does not exist.
        MismatchError: ranks have different loss scales, or request outputs elsewhere.
    """
    for one in reports:
        if one.error:
            raise ConfigError(one.error)
    scales = [one.loss_scale for one in reports]
    if len(set(scales)) > 1:
        raise MismatchError(
            f"expected one loss_scale on all ranks, got {scales} by rank"
        )
    wanted = [one.outputs for one in reports]
    if any(one != wanted[0] for one in wanted):
        raise MismatchError(
            f"expected one choice of outputs on all ranks, got {wanted} by rank"
        )
    known = ("last", "all", *range(len(reports)))
    if wanted[0] not in known or isinstance(wanted[0], bool):
        raise ConfigError(
            f"expected outputs= of 'last', 'all' or a rank below {len(reports)}, got "
            f"{wanted[0]!r}"
        )
    for members in groups.ranks:
        for name in sorted({key for rank in members for key in reports[rank].keywords}):
            have = [rank for rank in members if name in reports[rank].keywords]
            if not any(reports[rank].keywords[name] for rank in have):
                raise ConfigError(
                    f"no layer of {_ranks(have)} takes the keyword {name!r} that "
                    f"{reports[0].what} was given there; check its name, and give it "
                    "on every rank whose layers take it"
                )
            lack = [r for r in members if r not in have and name in named[r]]
            if lack:  # in one process all layers that name a keyword would receive it
                raise ConfigError(
                    f"{reports[0].what} was given the keyword {name!r} on "
                    f"{_ranks(have)}, but not on {_ranks(lack)}, whose layers take it, "
                    "too; give it on all of them"
                )


def _ranks(ranks: Sequence[int]) -> str:
    named = " and ".join(map(str, ranks))
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def warn_of_other_batch(reports: Sequence[InputReport], parts: Parts) -> None:
    """Warns if the first and the last stage's rank were given different batches.

    Loaders that shuffle differently on two ranks would silently train on wrong pairs.
    It is
    only a warning: augmentation may differ between two ranks that have the same
        samples.
    """
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
