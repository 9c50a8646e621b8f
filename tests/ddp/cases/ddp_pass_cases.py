"""What ranks run in the tests of several passes of one step."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from elche.ddp.wrapper import DistributedDataParallel
from elche.errors import ElcheError
from tests.ddp.cases.ddp_cases import FEATURES, gradients_of, torch_world
from tests.harness.rank_main import this_place

SIZES = ((4, 2), (2, 3))
"""Samples of each rank's two batches: other shares of each."""
ALIKE = ((4, 2), (2, 1))
TINY_MIB = 1e-5


class Slot:
    """An output whose tensors nobody finds."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors


class Heads(nn.Module):
    """A stem and two heads, of which a forward may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 5)
        self.heads = nn.ModuleList(nn.Linear(FEATURES, 5) for _ in range(2))
        self.hides = False

    def forward(self, x: torch.Tensor, head: int | None = None) -> Any:
        if head is not None:
            return self.stem(self.heads[head](x)[:, :1] * x)
        outs = self.heads[0](x), self.heads[1](self.stem(x)[:, :1] * x)
        return Slot(outs) if self.hides else outs


def batch(rank: int, which: int, sizes: Any = SIZES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + which)
    count = sizes[rank][which]
    return torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)


def model_of() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.square() + out).mean()


def both(outs: Any) -> torch.Tensor:
    return loss_of(outs[0]) + loss_of(outs[1])


def by_heads(outs: Any) -> None:
    """Two backwards of one forward, over other parameters."""
    for out in reversed(outs):  # the first bucket is of the last head
        loss_of(out).backward()


def break_off(_: torch.Tensor) -> None:
    raise ValueError("broken off")


def passes(case: str, cap: float) -> Any:
    """Gradients of a loop, or the error that refuses it."""
    with torch_world():
        try:
            return _passes(case, cap)
        except ElcheError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            gc.collect()


def _passes(case: str, cap: float) -> Any:
    model = model_of()
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap)
    rank = this_place().rank
    first, second = (batch(rank, which) for which in range(2))
    if cap < 1.0 and case != "heads":  # torch begins with one bucket
        both(ddp(first)).backward()
        ddp.zero_grad()
    alike = [batch(rank, which, ALIKE) for which in range(2)]

    def by_branches() -> torch.Tensor:
        return sum(loss_of(ddp(x, head)) for head, x in enumerate(alike))  # type: ignore[return-value]

    if case == "branches":
        with ddp.no_sync():
            ddp(first)
        by_branches().backward()
    elif case == "accumulated branches":
        with ddp.no_sync():
            by_branches().backward()
        by_branches().backward()
    elif case == "accumulated":
        with ddp.no_sync():
            both(ddp(first)).backward()
        both(ddp(second)).backward()
    elif case == "heads":
        for _ in range(3):
            ddp.zero_grad()
            by_heads(ddp(first))
    elif case == "heads last":
        with ddp.no_sync():
            both(ddp(first)).backward()
        by_heads(ddp(second))
    elif case == "hidden heads last":
        with ddp.no_sync():
            both(ddp(first)).backward()
        model.hides = True
        by_heads(ddp(second).tensors)
    elif case == "other forward":
        one, other = ddp(first), ddp(second)
        loss_of(one[1]).backward()
        loss_of(other[0]).backward()
    elif case == "accumulated heads":
        with ddp.no_sync():
            by_heads(ddp(first))
        both(ddp(second)).backward()
    elif case == "captured":
        with ddp.no_sync():
            ddp(second)
        torch.autograd.grad(both(ddp(second)), list(model.parameters()))
        both(ddp(first)).backward()
    elif case == "outlived":
        with ddp.no_sync():
            ddp(first[:0])
        del ddp
        ddp = DistributedDataParallel(model)
        both(ddp(first)).backward()
    elif case == "kept":
        with ddp.no_sync():
            ddp(first)
        both(ddp(first)).backward()
        with ddp.no_sync():
            both(ddp(first[:0])).nan_to_num().backward()
        both(ddp(first)).backward()
    elif case == "hidden":
        model.hides = True
        outs = [ddp(first), ddp(second)]
        for out in outs:
            both(out.tensors).backward()
    elif case == "broken":
        weight: Any = model.heads[0].weight
        weight.register_hook(break_off)
        try:
            both(ddp(first)).backward()
        except ValueError:
            ddp(first)
    return gradients_of(model)


def beside_float16() -> list[float]:
    """Norms of gradients where the total weight leaps; float16 is not sent first."""
    with torch_world():
        model = nn.Sequential(nn.Linear(FEATURES, 3).half(), nn.Linear(3, 1))
        model[1].register_forward_pre_hook(lambda _, inputs: inputs[0].float())
        ddp = DistributedDataParallel(model, bucket_cap_mb=TINY_MIB)
        x = batch(this_place().rank, 0).half()
        norms = []
        for weight in (1.0, 1.0, 1e6):
            ddp.zero_grad()
            ddp.set_weight(weight)
            loss_of(ddp(x)).backward()
            grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
            norms.append(float(sum(g.norm() for g in grads)))
        return norms


def alone(case: str) -> Any:
    """Gradients of the union of the ranks' batches."""
    model = model_of()
    sizes = ALIKE if case == "branches" else SIZES
    first, second = (
        torch.cat([batch(rank, which, sizes) for rank in range(2)])
        for which in range(2)
    )
    if case == "branches":
        for head, x in enumerate((first, second)):
            loss_of(model(x, head)).backward()
    elif case in ("accumulated", "heads last", "hidden heads last"):
        (2 * both(model(torch.cat([first, second])))).backward()
    else:
        both(model(first)).backward()
    return gradients_of(model)
