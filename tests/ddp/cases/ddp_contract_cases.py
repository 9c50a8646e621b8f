"""What ranks run in the tests of what `elche.DistributedDataParallel` promises."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from elche.comm.transport.process_group import Group
from elche.ddp.wrapper import DistributedDataParallel
from elche.errors import CommunicationError
from tests.ddp.cases.ddp_cases import FEATURES, STORE, build, gradients_of, torch_world
from tests.distributed.patience import all_here, lose_patience
from tests.harness.rank_main import this_place

KINDS = {"elche": DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}


def data(seed: int = 0, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Another batch on every rank."""
    return batch_of(this_place().rank, seed, count)


def batch_of(rank: int, seed: int, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a rank."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=generator)


def backward(ddp: Any, seed: int = 0, count: int = 4) -> None:
    x, y = data(seed, count)
    F.cross_entropy(ddp(x), y).backward()


def local_gradients(model: nn.Module, seed: int = 0) -> dict[str, Any]:
    """What this rank alone computes, on a copy of the model."""
    twin = build("mlp")
    twin.load_state_dict(model.state_dict())
    backward(twin, seed)
    return gradients_of(twin)


def unreduced(how: str) -> tuple[Any, Any]:
    """Gradients by a strategy or inside `no_sync`, and those of this rank alone."""
    with torch_world():
        if how == "no_sync":
            ddp = DistributedDataParallel(build("mlp"))
            with ddp.no_sync():
                backward(ddp)
            assert ddp.last_reduction is None
        else:
            ddp = DistributedDataParallel(build("mlp"), strategy=how)
            backward(ddp)
            ddp.join_step()
        return gradients_of(ddp.module), local_gradients(ddp.module)


def buffers(kind: str, **options: Any) -> list[Any]:
    """Running means after the start, a step, an accumulated step and an evaluation."""
    with torch_world():
        # torch's wrapper may deadlock if it outlives its group: it ends with the call.
        return _buffers(KINDS[kind], options)


def _buffers(wrapper: Any, options: dict[str, Any]) -> list[Any]:
    found, model = [], build("cnn", seed=3)
    norm = model[2]
    norm.running_mean += this_place().rank
    ddp = wrapper(model, **options)
    found.append(norm.running_mean.clone())
    backward(ddp, 1)
    ddp.eval()
    ddp(data(1)[0])
    ddp.train()
    found.append(norm.running_mean.clone())
    with ddp.no_sync():
        backward(ddp, 2)
    backward(ddp, 3)
    ddp.eval()
    ddp(data(1)[0])
    found.append(norm.running_mean.clone())
    found.append(norm.num_batches_tracked.clone())
    return found


def buffers_of_who_trained() -> tuple[Any, Any]:
    """Rank 0 has no batch: the others' statistics must not be lost."""
    with torch_world():
        ddp = DistributedDataParallel(build("cnn"))
        before = ddp.module[2].running_mean.clone()
        if this_place().rank == 0:
            ddp.join_step()
        else:
            backward(ddp)
        return before, ddp.module[2].running_mean.clone()


def evaluate_on_one_rank() -> bool:
    """An evaluation on rank 0 alone waits for nobody."""
    with torch_world():
        ddp = DistributedDataParallel(build("cnn"))
        backward(ddp)
        if this_place().rank == 0:
            ddp.eval()
            with torch.no_grad():
                ddp(data()[0])
            ddp.train()
        backward(ddp)
        return True


class Shared(nn.Module):
    """A layer that is checkpointed twice: two gradients of it in one backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.spare = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        result: torch.Tensor = self.head(x)
        return result


def checkpointed(reentrant: bool) -> Any:
    """Gradients of three backwards."""
    with torch_world():
        torch.manual_seed(3)
        model = Shared(reentrant=reentrant).double()
        ddp = DistributedDataParallel(model, static_graph=True, bucket_cap_mb=1e-5)
        found = []
        for step in range(3):
            ddp.zero_grad()
            backward(ddp, step)
            found.append(gradients_of(model))
        return found


def checkpointed_alone() -> Any:
    """The mean over two ranks of what :func:`checkpointed` computes."""
    torch.manual_seed(3)
    model = Shared(reentrant=False).double()
    found = []
    for step in range(3):
        model.zero_grad()
        for rank in range(2):
            x, y = batch_of(rank, step)
            (F.cross_entropy(model(x), y) / 2).backward()
        found.append(gradients_of(model))
    return found


def weigh(case: str) -> Any:
    """Gradients and weights where this rank's weight is set or not counted."""
    rank = this_place().rank
    with torch_world():
        plain = case == "ranks"
        ddp = DistributedDataParallel(
            build("mlp"), weight_by="ranks" if plain else "samples", dim=case == "dim"
        )
        own = local_gradients(ddp.module)
        if case == "tokens":
            ddp.set_weight((30.0, 10.0)[rank])
        elif case == "zero":
            ddp.set_weight(float(rank))
        backward(ddp)
        first = ddp.last_reduction.weights
        reduced = gradients_of(ddp.module)
        backward(ddp, 1)
        return own, reduced, first, ddp.last_reduction.weights


def refused(case: str) -> str:
    """The error of a wrapper that cannot be made, or cannot go on."""
    odd, further = this_place().rank == 1, ()
    model, options = build("mlp"), {}
    if case == "shape" and odd:
        model[2] = nn.Linear(16, 4).double()
    elif case == "frozen" and odd:
        model[0].requires_grad_(False)
    elif case == "order" and odd:
        model = nn.Sequential(*reversed(build("deep")[:6]))
        model._modules = dict(reversed(list(model._modules.items())))
    elif case == "order":
        model = build("deep")[:6]
    elif case == "plan":
        options["bucket_cap_mb"] = 2.0 if odd else 1.0
    elif case == "sparse" and odd:
        model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3))
    elif case == "meta" and odd:
        model.to("meta")
    elif case == "codec":
        options["codec"] = "int8"
    elif case == "precision":
        options["mixed_precision"] = object()
    elif case == "by place":
        further = *[None] * 2, 0, None, True, None, None, *[False] * 4, None, ["x"]
    elif case == "no name":
        options["find_unused"] = True
    elif case == "only torch's":
        options = {"mixed_precision": None, "batched_grad_copy": True}
    elif case == "cap":
        options["bucket_cap_mb"] = -1.0
    elif case == "strategy":
        options["strategy"] = "eager"
    with torch_world():
        try:
            DistributedDataParallel(model, *further, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "made"


def misused(case: str) -> str:
    """The error of a wrapper that is used wrongly."""
    with torch_world():
        model = build("mlp")
        if case == "unfrozen":
            model[0].requires_grad_(False)
        static = case == "static"
        loss = "sum" if case == "twice summed" else "mean"
        ddp = DistributedDataParallel(model, loss_reduction=loss, static_graph=static)
        x, _ = data()
        try:
            if case == "unfrozen":
                model[0].requires_grad_(True)
                ddp(x)
            elif case == "twice summed":
                backward(ddp)
                ddp.zero_grad(set_to_none=False)
                backward(ddp)
                backward(ddp)
            elif case == "weight":
                ddp.set_weight(-1.0)
            elif case == "some weights":
                with ddp.no_sync():
                    backward(ddp)
                ddp.set_weight(3.0)
                backward(ddp)
            elif case == "added to a sum":
                backward(ddp)
                with ddp.no_sync():
                    backward(ddp, 1)
                backward(ddp, 2, count=3)
            elif case == "static":
                with ddp.no_sync():
                    ddp(x)
            elif case == "two hooks":
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
            elif case == "elche's group":
                DistributedDataParallel(model, process_group=Group.alone(1.0))
            elif case == "joined static":
                DistributedDataParallel(model, static_graph=True).join_step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            model.zero_grad()
    return "no error"


def late(transport: str) -> str:
    """Rank 1 does not come to the second step."""
    rank = this_place().rank
    with torch_world():
        ddp = DistributedDataParallel(build("mlp"), transport=transport)
        backward(ddp)
        all_here(os.environ[STORE])
        lose_patience(ddp._group, 1.0)
        if rank == 1:
            return "away"
        own = local_gradients(ddp.module, 1)
        ddp.zero_grad()
        try:
            backward(ddp, 1)
        except CommunicationError as error:
            for name, value in gradients_of(ddp.module).items():
                assert torch.equal(value, own[name]), name
            return f"{type(error).__name__}: {error}"
    return "reduced"


def killed(transport: str) -> str:
    """Rank 1's process ends inside the second step."""
    with torch_world(timeout_s=300.0):
        ddp = DistributedDataParallel(build("mlp"), transport=transport)
        backward(ddp)
        if this_place().rank == 1:
            os._exit(3)
        try:
            backward(ddp, 1)
        except CommunicationError as error:
            return str(error)
    return "reduced"


def several_backwards(case: str) -> dict[str, Any]:
    """Gradients where forwards and backwards do not come in pairs."""
    with torch_world():
        ddp = DistributedDataParallel(build("mlp"))
        _several_backwards(ddp, case, this_place().rank)
        if case == "skipped":
            assert ddp.last_reduction is not None
            assert ddp.last_reduction.weights == (4.0, 4.0)
        return gradients_of(ddp.module)


def several_backwards_alone(case: str) -> dict[str, Any]:
    """The mean over two ranks of the same, in this process."""
    model = build("mlp")
    for rank in range(2):
        _several_backwards(model, case, rank)
    return {name: g / 2 for name, g in gradients_of(model).items() if g is not None}


def _several_backwards(model: Any, case: str, rank: int) -> None:
    (x, y), (other, z) = batch_of(rank, 0), batch_of(rank, 1)
    if case == "penalty":
        x.requires_grad_(True)
    if case == "skipped":
        model(other)  # its loss was not finite, say
    out = model(x)
    loss = F.cross_entropy(out, y)
    if case == "two forwards":
        loss = loss + F.cross_entropy(model(other), z)
    elif case == "penalty":
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = loss + slope.square().mean()
    loss.backward(retain_graph=case == "retained")
    if case == "retained":
        loss.backward()
    elif case == "twice":
        F.cross_entropy(model(other), z).backward()
    elif case == "inner" and rank == 0:  # beside the wrapper: nobody is waited for
        beside = getattr(model, "module", model)
        F.cross_entropy(beside(x), y).backward(inputs=[x.requires_grad_()])
        torch.autograd.grad(model(x).sum(), list(model.parameters()))


def uneven_loops(divide: bool) -> tuple[Any, Any]:
    """Rank 1 has more batches; the state at the end, and who weighed when."""
    with torch_world():
        model = build("mlp")
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        weights = []
        with ddp.join(divide_by_initial_world_size=divide):
            for step in range(2 + 2 * this_place().rank):
                backward(ddp, step)
                assert ddp.last_reduction is not None
                weights.append(ddp.last_reduction.weights)
                optimizer.step()
                optimizer.zero_grad()
        return {k: v.clone() for k, v in model.state_dict().items()}, weights


def uneven_loops_alone(divide: bool) -> dict[str, Any]:
    """The same in this process: two steps of both ranks, two of rank 1."""
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        ranks = (0, 1) if step < 2 else (1,)
        for rank in ranks:
            x, y = batch_of(rank, step)
            share = 2 if divide else len(ranks)
            (F.cross_entropy(model(x), y) / share).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def accumulate_then_join() -> Any:
    """Rank 1 has accumulated a batch, and has none left for the step itself."""
    with torch_world():
        ddp = DistributedDataParallel(build("mlp"))
        if this_place().rank == 1:
            with ddp.no_sync():
                backward(ddp)
            reduction = ddp.join_step()
        else:
            backward(ddp)
            reduction = ddp.last_reduction
        assert reduction is not None
        assert reduction.wait_s > 0.0
        return gradients_of(ddp.module), reduction.weights


def by_a_hook(name: str, loss: str) -> list[Any]:
    """Gradients of unequal batches, reduced by a hook of torch's and by elche."""
    found, count = [], 3 + 2 * this_place().rank
    with torch_world():
        for hook in (getattr(default_hooks, name), None):
            model = build("mlp", dtype="float32")
            ddp = DistributedDataParallel(model, loss_reduction=loss)
            if hook is not None:
                ddp.register_comm_hook(None, hook)
            for step in range(2):
                ddp.zero_grad()
                x, y = data(step, count)
                F.cross_entropy(ddp(x.float()), y, reduction=loss).backward()
            found.append(gradients_of(model))
            assert ddp.last_reduction is not None
            assert ddp.last_reduction.weights == (3.0, 5.0)
    return found
