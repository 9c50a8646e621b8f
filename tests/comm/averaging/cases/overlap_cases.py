"""Scripted training averaged by ranks, and by the same algorithm written out plainly.

What a rank does between synchronisations is scripted: noise instead of gradients, so
that the simulation knows every step to the bit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from elche.comm.averaging.averaging import Averager, ParameterAverager
from elche.comm.averaging.overlap import OverlappedAverager
from elche.comm.transport.exchange import GlooExchange, SharedExchange
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from tests.comm.plans import plan
from tests.harness.rank_main import this_place

STORE = "ELCHE_TEST_STORE"


@dataclass(frozen=True)
class Script:
    """What the ranks do.

    Attributes:
        steps: local steps of each rank in a window.
        lag: how many of the next window's steps it takes before it adopts a mean.
        weights: of each window, a weight per rank; a rank of weight 0 takes no steps.
    """

    steps: tuple[int, ...] = (3, 1)
    lag: tuple[int, ...] = (2, 0)
    weights: tuple[tuple[float, ...], ...] = ((0.5, 0.5),) * 4
    model: str = "norm"
    outer: str = "average"
    momentum: float = 0.5

    @property
    def world_size(self) -> int:
        return len(self.steps)

    def plan(self, rank: int, window: int, buffers: Sequence[int]) -> Reduce:
        weights = self.weights[window]
        return plan(
            rank,
            window=window,
            weight=weights[rank],
            active_ranks=sum(weight > 0 for weight in weights),
            buffers=tuple(buffers),
            outer=self.outer,
            outer_lr=1.0 if self.outer == "average" else 0.7,
            outer_momentum=self.momentum,
        )

    def steps_of(self, rank: int, window: int) -> list[int]:
        """The numbers of the steps that a rank takes in a window."""
        if self.weights[window][rank] == 0:
            return []
        return [100 * window + number for number in range(self.steps[rank])]

    def lag_of(self, rank: int, window: int) -> int:
        """How many steps of the next window come before the mean of this one."""
        if window + 1 == len(self.weights):
            return 0
        return min(self.lag[rank], len(self.steps_of(rank, window + 1)))


@dataclass
class Seen:
    """What a rank found out, and what it holds at the end."""

    divergences: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class Tied(nn.Module):
    """A weight used twice, and one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float32))


def build(script: Script) -> nn.Module:
    """The model, the same at every call."""
    torch.manual_seed(3)
    if script.model == "tied":
        model: nn.Module = Tied().double()
        model.scale = nn.Parameter(torch.ones(4, dtype=torch.float32))
        return model
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model.register_buffer("mask", torch.tensor([0.0, float("-inf"), float("nan")]))
    if script.model == "half":
        return model.to(torch.bfloat16)
    if script.model == "frozen":
        model.get_submodule("0").requires_grad_(False)
    return model.double()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def local_step(model: nn.Module, rank: int, number: int) -> None:
    """One batch: buffers by a forward pass, parameters by noise."""
    generator = torch.Generator().manual_seed(10_000 * rank + number)
    with torch.no_grad():
        if isinstance(model, nn.Sequential):
            dtype = next(model.parameters()).dtype
            model(torch.randn(6, 4, generator=generator).to(dtype))
        for parameter in trainable(model):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise.to(parameter.dtype))


def simulate(script: Script) -> list[Seen]:
    """All ranks in this process, by the definition of the algorithm."""
    ranks = range(script.world_size)
    models = [build(script) for _ in ranks]
    seen = [Seen() for _ in ranks]
    base = [_wide(p) for p in trainable(models[0])]
    momentum = [torch.zeros_like(p) for p in base]
    counts = {n: b.clone() for n, b in models[0].named_buffers() if _is_count(b)}
    floats = {
        name: buffer.to(torch.float64, copy=True)
        for name, buffer in models[0].named_buffers()
        if not _is_count(buffer)
    }
    for window, weights in enumerate(script.weights):
        for rank in ranks:
            begun = script.lag_of(rank, window - 1) if window else 0
            for number in script.steps_of(rank, window)[begun:]:
                local_step(models[rank], rank, number)
        snaps = [[_wide(p) for p in trainable(model)] for model in models]
        held = [{n: b.clone() for n, b in model.named_buffers()} for model in models]
        for rank in ranks:
            lag = script.lag_of(rank, window)
            for number in script.steps_of(rank, window + 1)[:lag] if lag else []:
                local_step(models[rank], rank, number)
        drift = [torch.zeros_like(p) for p in base]
        for rank in ranks:
            for total, old, own in zip(drift, base, snaps[rank], strict=True):
                total += weights[rank] * (old - own)
        mean = [old - moved for old, moved in zip(base, drift, strict=True)]
        momentum = [
            script.momentum * m + d for m, d in zip(momentum, drift, strict=True)
        ]
        if script.outer == "average":
            new = mean
        elif script.outer == "slowmo":
            new = [old - 0.7 * m for old, m in zip(base, momentum, strict=True)]
        else:
            new = [
                old - 0.7 * (d + script.momentum * m)
                for old, d, m in zip(base, drift, momentum, strict=True)
            ]
        norm = _norm(new)
        for rank in ranks:
            apart = [a - b for a, b in zip(snaps[rank], mean, strict=True)]
            seen[rank].divergences.append(
                _norm(apart) / norm if weights[rank] > 0 else 0.0
            )
            seen[rank].norms.append(norm)
            _correct(trainable(models[rank]), new, snaps[rank])
        _settle_buffers(models, held, counts, floats, weights)
        base = new
    for rank in ranks:
        seen[rank].state = state_of(models[rank])
    return seen


def _correct(
    parameters: list[nn.Parameter], new: list[torch.Tensor], old: list[torch.Tensor]
) -> None:
    with torch.no_grad():
        for parameter, after, before in zip(parameters, new, old, strict=True):
            wide = parameter.to(after.dtype) + (after - before)
            parameter.copy_(wide)


def _settle_buffers(
    models: list[nn.Module],
    held: list[dict[str, torch.Tensor]],
    counts: dict[str, torch.Tensor],
    floats: dict[str, torch.Tensor],
    weights: Sequence[float],
) -> None:
    active = [rank for rank, weight in enumerate(weights) if weight > 0]
    for name in held[0]:
        if name == "mask":
            continue
        if name in counts:
            total = sum((held[rank][name] - counts[name] for rank in active), start=0)
            after = counts[name] + total
            for rank, model in enumerate(models):
                buffer = model.get_buffer(name)
                buffer.copy_(after + buffer - held[rank][name])
            counts[name] = after
        else:
            if active:
                total = sum((held[rank][name].double() for rank in active), start=0)
                floats[name] = total / len(active)
            for model in models:
                model.get_buffer(name).copy_(floats[name])


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    half = parameter.dtype == torch.bfloat16
    return parameter.detach().to(torch.float32 if half else parameter.dtype, copy=True)


def _is_count(buffer: torch.Tensor) -> bool:
    return not buffer.is_floating_point()


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([t.double().flatten() for t in tensors]).norm())


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextmanager
def meeting(world_size: int) -> Iterator[Sequence[Mapping[str, str]]]:
    """A folder where the ranks of a case find each other."""
    with tempfile.TemporaryDirectory() as folder:
        yield [{STORE: folder}] * world_size


@contextmanager
def joined(
    transport: str,
    timeout_s: float = 60.0,
    members: tuple[int, ...] | None = None,
    name: str = "",
) -> Iterator[Group]:
    """A group of all ranks of the case, or of some of them; or another such group."""
    place = this_place()
    ranks = tuple(range(place.world_size)) if members is None else members
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    rank = ranks.index(place.rank)
    path = os.path.join(os.environ[STORE], name + "-".join(map(str, ranks)))
    store = dist.FileStore(path, len(ranks))
    made = dist.ProcessGroupGloo(store, rank, len(ranks), options)
    group = Group(made, rank, len(ranks), timeout_s)
    del made  # a test may close the group, and with it the connections
    group.shares_host = transport == "shared"
    try:
        yield group
    finally:
        group.close()


def averager_of(
    model: nn.Module, group: Group, kind: type[Averager] = OverlappedAverager
) -> Any:
    """An averager of the model's trainable parameters, built."""
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    averager = kind(trainable(model), model, lambda: [optimizer], group)
    averager.build()
    return averager


def all_changed(group: Group, mine: Sequence[int]) -> list[int]:
    """Buffers that any rank changed; every rank waits here, as for a `Reduce`."""
    flags = torch.zeros(16)
    flags[list(mine)] = 1.0
    group.all_reduce(flags, "all ranks to close")
    return [index for index, flag in enumerate(flags.tolist()) if flag]


def overlapped(script: Script, transport: str) -> Seen:
    """The script on this rank."""
    rank = this_place().rank
    model, seen = build(script), Seen()
    with joined(transport) as group, joined("gloo", name="control") as control:
        averager = averager_of(model, group)
        made = {type(each.exchange) for each in averager._groups}
        assert made == {SharedExchange if transport == "shared" else GlooExchange}
        begun = 0
        for window in range(len(script.weights)):
            for number in script.steps_of(rank, window)[begun:]:
                local_step(model, rank, number)
            assert averager.snapshot(script.weights[window][rank])
            buffers = all_changed(control, averager.changed_buffers())
            reduction = script.plan(rank, window, buffers)
            averager.begin(reduction)
            begun = script.lag_of(rank, window)
            for number in script.steps_of(rank, window + 1)[:begun] if begun else []:
                local_step(model, rank, number)
                averager.poll()
            is_last = window + 1 == len(script.weights)
            result = averager.adopt(reduction, drained=is_last)
            seen.divergences.append(result.divergence)
            seen.norms.append(result.parameter_norm)
    seen.state = state_of(model)
    return seen


def blocking(script: Script, transport: str) -> Seen:
    """The script on this rank, averaged at once; the script has no lag."""
    rank = this_place().rank
    model, seen = build(script), Seen()
    with joined(transport) as group:
        averager = averager_of(model, group, ParameterAverager)
        for window in range(len(script.weights)):
            for number in script.steps_of(rank, window):
                local_step(model, rank, number)
            buffers = all_changed(group, averager.changed_buffers())
            result = averager.synchronise(script.plan(rank, window, buffers))
            seen.divergences.append(result.divergence)
            seen.norms.append(result.parameter_norm)
    seen.state = state_of(model)
    return seen


def poisoned(transport: str) -> dict[str, Any]:
    """The last rank's parameters are no numbers; it is given weight 0."""
    place = this_place()
    script = Script(steps=(1,) * place.world_size)
    model = build(script)
    is_bad = place.rank == place.world_size - 1
    with joined(transport) as group:
        averager = averager_of(model, group)
        local_step(model, place.rank, 0)
        if is_bad:
            with torch.no_grad():
                trainable(model)[0][0, 0] = float("nan")
        is_finite = averager.snapshot(1.0)
        buffers = all_changed(group, averager.changed_buffers())
        active = place.world_size - 1
        weight = 0.0 if is_bad else 1 / active
        reduction = plan(weight=weight, active_ranks=active, buffers=tuple(buffers))
        averager.begin(reduction)
        result = averager.adopt(reduction)
    return {
        "is_finite": is_finite,
        "divergence": result.divergence,
        "state": state_of(model),
    }


def many_windows(transport: str, windows: int) -> list[float]:
    """Windows as short as can be, the ranks out of step in turns."""
    rank = this_place().rank
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    sums = []
    with joined(transport) as group:
        averager = averager_of(model, group)
        for window in range(windows):
            with torch.no_grad():
                model.weight.add_(2.0 * rank + window % 3)
            averager.snapshot(1.0)
            all_changed(group, ())
            reduction = plan(window=window, weight=0.5)
            averager.begin(reduction)
            if window % 2 == rank:
                while not averager.poll():
                    pass
            averager.adopt(reduction, drained=True)
            first = model.weight.detach().flatten()[0]
            assert bool((model.weight == first).all())
            sums.append(float(first))
    return sums
