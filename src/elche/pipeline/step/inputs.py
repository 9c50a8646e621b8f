"""Inputs of a step or an evaluation: read, checked and cut.

Each rank reads its own part and reports it to the others before anything runs, so
that an error in one part is raised on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from elche.errors import ConfigError, MismatchError
from elche.pipeline.replicas.replica_groups import ReplicaGroups
from elche.pipeline.stage import Stage
from elche.pipeline.trees import as_tensors, batch_samples, map_tensors


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `step` or `evaluate` as the script makes it.

    Attributes:
        what: name of the method.
        batch: see `elche.pipeline.Pipeline.step`.
        target: see there.
        keywords: see there.
        loss_scale: see there.
        input_gradients: see there.
        outputs: see `elche.pipeline.Pipeline.evaluate`.
        make_batch: makes the batch on the rank that reads it; other ranks are told
            where that fails.
    """

    what: str
    batch: Any = None
    target: Any = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float = 1.0
    input_gradients: bool = False
    outputs: Any = "last"
    make_batch: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Position of a rank in its pipeline.

    Attributes:
        rank: its number.
        device: where it computes.
        stages: that it runs.
        is_first: whether it reads the batch.
        is_last: whether it reads the target.
        may_rest: whether there may be no batch for it, because others have one.
        trouble: what is wrong with the rank itself, "" if nothing is.
    """

    rank: int
    device: torch.device
    stages: Sequence[Stage]
    is_first: bool
    is_last: bool
    may_rest: bool
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class InputReport:
    """A rank's report to the others about its part of a call.

    Attributes:
        what: name of the method.
        error: what is wrong, "" if nothing is.
        samples: of the batch, on the rank that reads it.
        targets: of the target, on the rank that reads it; -1 if they cannot be counted.
        loss_scale: of the call.
        keywords: names of those given, and whether a layer of the rank may take them.
        outputs: which ranks want the outputs.
    """

    what: str
    error: str = ""
    samples: int | None = None
    targets: int | None = None
    loss_scale: float = 1.0
    keywords: Mapping[str, bool] = field(default_factory=dict)
    outputs: int | str = "last"

    def as_message(self) -> list[Any]:
        """Fields that the ranks exchange."""
        return list(astuple(self))


@dataclass(frozen=True, slots=True)
class LocalInput:
    """This rank's own part of a call.

    Attributes:
        report: for the other ranks.
        batch: on the device; None where it is not read.
        target: likewise.
        keywords: on the device.
        raised: what reading it came to.
    """

    report: InputReport
    batch: Any = None
    target: Any = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    raised: Exception | None = None


def read_call(call: Call, seat: Seat) -> LocalInput:
    """Reads what this rank needs of a call; never raises."""
    try:
        return _read(call, seat)
    except Exception as error:
        name = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        text = f"{name}{error}"
        return LocalInput(
            InputReport(call.what, text or type(error).__name__), raised=error
        )


def _read(call: Call, seat: Seat) -> LocalInput:
    what, rank = call.what, seat.rank
    if what == "step" and not torch.is_grad_enabled():
        raise ConfigError(
            f"step runs under torch.no_grad() or inference_mode() on rank {rank}, "
            "where there are no gradients; call it outside, or call evaluate"
        )
    if seat.trouble:
        raise ConfigError(seat.trouble)
    loss_scale = scale_of(call.loss_scale)
    batch = target = samples = targets = None
    if seat.is_first:
        given = call.batch if call.make_batch is None else call.make_batch()
        batch = as_tensors(given, f"the batch on rank {rank}")
        samples = batch_samples(batch)
        if samples is None and not (seat.may_rest and batch is None):
            raise ConfigError(
                f"{what} needs a batch on rank {rank}, which has the first stage: "
                "expected a tensor with samples along its first dimension, got "
                f"{type(batch).__name__}"
            )
    if seat.is_last and call.target is not None:
        target = as_tensors(call.target, f"the target on rank {rank}")
        targets = batch_samples(target)
        targets = -1 if targets is None else targets
    elif seat.is_last and what == "step" and not seat.may_rest:
        raise ConfigError(
            f"step needs a target on rank {rank}, which has the last stage"
        )

    def here(value: Any) -> Any:
        return map_tensors(value, lambda tensor: tensor.to(seat.device))

    keywords = {
        name: here(as_tensors(one, f"keyword {name} on rank {rank}", is_cut=False))
        for name, one in call.keywords.items()
    }
    takes = {name: any(one.takes(name) for one in seat.stages) for name in keywords}
    report = InputReport(what, "", samples, targets, loss_scale, takes, call.outputs)
    return LocalInput(report, here(batch), here(target), keywords)


def scale_of(loss_scale: Any) -> float:
    """A number that gradients can be multiplied with and divided by.

    Raises:
        ConfigError: it is not a number, or not finite and above 0.
    """
    found = number_of(loss_scale, "loss_scale")
    if not 0 < found < math.inf:
        raise ConfigError(f"expected a finite loss_scale above 0, got {loss_scale!r}")
    return found


def number_of(value: Any, name: str) -> float:
    """A number that may be a tensor's.

    Raises:
        ConfigError: it is not a number.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"expected a number as {name}, got {value!r}") from None


def check_reports(reports: Sequence[InputReport], groups: ReplicaGroups) -> None:
    """Compares the reports of all ranks; raises the same error on all of them.

    Raises:
        ConfigError: a keyword is taken by no layer where it was given, or outputs are
            wanted on a rank that there is not.
        MismatchError: ranks have different loss scales, or want outputs elsewhere.
    """
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
        given = sorted({name for rank in members for name in reports[rank].keywords})
        for name in given:
            ranks = [rank for rank in members if name in reports[rank].keywords]
            if not any(reports[rank].keywords[name] for rank in ranks):
                raise ConfigError(
                    f"no layer of {_ranks(ranks)} takes the keyword {name!r} that "
                    f"{reports[0].what} was given there; check its name, and give it "
                    "on every rank whose layers take it"
                )


def check_shared(
    reports: Sequence[InputReport],
    named: Sequence[Sequence[str]],
    groups: ReplicaGroups,
) -> None:
    """Compares the keywords that were given with those that layers name.

    In one process all layers that name a keyword get it.

    Args:
        reports: by rank.
        named: by rank, the keywords of any rank that its layers name.
        groups: the replicas.

    Raises:
        ConfigError: a rank's layers name a keyword that only others were given.
    """
    for members in groups.ranks:
        given = sorted({name for rank in members for name in reports[rank].keywords})
        for name in given:
            have = [rank for rank in members if name in reports[rank].keywords]
            lack = [rank for rank in members if name in named[rank]]
            lack = [rank for rank in lack if rank not in have]
            if lack:
                raise ConfigError(
                    f"{reports[0].what} was given the keyword {name!r} on "
                    f"{_ranks(have)}, but not on {_ranks(lack)}, whose layers take it, "
                    "too; give it on all of them"
                )


def _ranks(ranks: Sequence[int]) -> str:
    named = " and ".join(map(str, ranks))
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
