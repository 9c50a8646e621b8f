"""What loops of one's own are built from, on any devices; `cuda_paths.py` calls it.

    elche run --devices cuda:0,cpu benchmarks/cuda_parts.py ddp

Every part trains in float64 on unequal batches and compares with the same steps in one
process on the CPU. Rank 0 prints a line of JSON: the relative difference, and what the
part has to say beside that.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

import elche
from elche.devices import backends, choice

STEPS, WARM_UP, CLASSES, WIDTH = 12, 4, 5, 8
WIDE, ROWS = 256, 1024
"""Of the messages that are timed: half a MiB for each microbatch."""
State = dict[str, torch.Tensor]
Result = tuple[State, State, dict[str, Any]]
"""What came out, what one process gets, and what else there is to say."""


def network(norm: bool = False) -> nn.Sequential:
    """A small network, the same at every call."""
    torch.manual_seed(3)
    layers = [
        nn.Conv2d(3, WIDTH, 3, padding=1),
        nn.BatchNorm2d(WIDTH) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        nn.BatchNorm2d(WIDTH) if norm else nn.Identity(),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * WIDTH, CLASSES),
    ]
    return nn.Sequential(*layers).double()


def batch(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of all ranks together."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (samples,), generator=generator)


def sizes(step: int, world_size: int) -> list[int]:
    """Samples of each rank: unequal, and in every fourth step one has none."""
    counts = [6 + 10 * ((rank + step) % 2) for rank in range(world_size)]
    if step % 4 == 3 and world_size > 1:
        counts[-1] = 0
    return counts


def part_of(tensor: torch.Tensor, counts: Sequence[int], rank: int) -> torch.Tensor:
    """A rank's samples, on its device."""
    return tensor.split(list(counts))[rank].to(elche.device())


def state_of(*models: nn.Module) -> State:
    """Float tensors on the host."""
    return {
        f"{index}.{name}": value.detach().cpu()
        for index, model in enumerate(models)
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }


def alone(norm: bool = False) -> State:
    """All steps in this process."""
    model = network(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step, sum(sizes(step, elche.world_size())))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def ddp() -> Result:
    """`elche.DistributedDataParallel`: accumulation, steps without a batch."""
    device = elche.device()
    through_host = backends.gloo_takes(torch.empty(0, device=device))
    backend = "gloo" if through_host else backends.own_backend(device)
    choice.use(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60.0))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = network().to(elche.device())
    wrapped = elche.DistributedDataParallel(
        model, bucket_cap_mb=0.01, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2, momentum=0.9)
    wait_s = started_s = 0.0
    for step in range(STEPS):
        if step == WARM_UP:
            started_s = time.perf_counter()
        counts = sizes(step, world_size)
        x, y = (part_of(t, counts, rank) for t in batch(step, sum(counts)))
        parts = list(zip(x.chunk(2), y.chunk(2), strict=True)) if len(x) else []
        for number, (part_x, part_y) in enumerate(parts):
            with wrapped.no_sync() if number == 0 else nullcontext():
                loss = F.cross_entropy(wrapped(part_x), part_y)
                (loss / len(parts)).backward()
        if not parts:
            wrapped.join_step()
        done = wrapped.last_reduction
        assert done is not None
        wait_s += done.wait_s
        optimizer.step()
        optimizer.zero_grad()
    float(next(model.parameters()).sum())  # the device is through
    step_s = (time.perf_counter() - started_s) / (STEPS - WARM_UP)
    said = {
        "step_ms": 1e3 * step_s,
        "wait_ms": 1e3 * wait_s / STEPS,
    }
    return state_of(model), alone(), said


def sync_batch_norm() -> Result:
    """SyncBatchNorm over both devices, gradients reduced by hand."""
    group = elche.init_group(timeout_s=60.0)
    model = elche.convert_sync_batchnorm(network(norm=True)).to(elche.device())
    replica = elche.Replica.wrap(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        counts = sizes(step, group.world_size)
        x, y = (part_of(t, counts, group.rank) for t in batch(step, sum(counts)))
        loss = F.cross_entropy(model(x), y, reduction="sum") / max(1, len(x))
        loss.backward()
        replica.weighted_all_reduce_gradients(len(x))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model), alone(norm=True), {}


def replica() -> Result:
    """Two models that train each other, in one group."""
    group = elche.init_group(timeout_s=60.0)
    found = adversaries(
        group.rank,
        lambda model, name: (
            elche.Replica.wrap(model, group, name=name).weighted_all_reduce_gradients
        ),
    )
    return found, adversaries(None, None), {}


def adversaries(
    rank: int | None, reducer: Callable[[nn.Module, str], Any] | None
) -> State:
    """A generator and a critic; rank None: on all samples, on the CPU."""
    torch.manual_seed(4)
    models = {"generator": nn.Linear(6, 4).double(), "critic": nn.Linear(4, 1).double()}
    device = torch.device("cpu") if rank is None else elche.device()
    reduce, optimizers = {}, {}
    for name, model in models.items():
        model.to(device)
        optimizers[name] = torch.optim.Adam(model.parameters(), lr=1e-2)
        if reducer is not None:
            reduce[name] = reducer(model, name)
    generator, critic = models["generator"], models["critic"]
    for step in range(STEPS):
        counts = sizes(step, elche.world_size())
        noise = batch(step, sum(counts))[0].flatten(1)[:, :6]
        mine = noise if rank is None else part_of(noise, counts, rank)
        for name in models:
            fake = generator(mine)
            scores = critic(fake.detach() if name == "critic" else fake).tanh()
            sign = 1.0 if name == "critic" else -1.0
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            (sign * scores.sum() / max(1, len(mine))).backward()
            if rank is not None:
                reduce[name](counts[rank])
            optimizers[name].step()
    return state_of(generator, critic)


def pipeline() -> Result:
    """A model in stages, one per device."""
    with elche.pipeline.Pipeline(layers(), loss_of, micro_batches=4, seed=0) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.2, momentum=0.9)
        losses = []
        for step in range(STEPS):
            x, y = batch(step, 16)
            losses.append(float(pipe.step(x, y).loss or 0.0))
            optimizer.step()
            pipe.zero_grad()
        shown = {"schedule": pipe.schedule.name, "stages": pipe.schedule.num_stages}
    model = nn.Sequential(*(make() for make in layers()))
    reference = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    expected = []
    for step in range(STEPS):
        x, y = batch(step, 16)
        loss = loss_of(model(x), y)
        loss.backward()
        reference.step()
        reference.zero_grad()
        expected.append(float(loss.detach()))
    return {"losses": torch.tensor(losses)}, {"losses": torch.tensor(expected)}, shown


def layers() -> list[Callable[[], nn.Module]]:
    """Factories of six layers, each the same at every call."""

    def make(index: int) -> nn.Module:
        torch.manual_seed(10 + index)
        if index == 0:
            return nn.Sequential(nn.Flatten(), nn.Linear(192, 32)).double()
        if index == 5:
            return nn.Linear(32, CLASSES).double()
        return nn.Sequential(nn.Linear(32, 32), nn.Tanh()).double()

    return [lambda index=index: make(index) for index in range(6)]  # type: ignore[misc]


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over samples."""
    return F.cross_entropy(out, target)


def messages() -> Result:
    """A pipeline with large messages: through NCCL where it serves, and the host."""
    torch.manual_seed(5)
    x, y = torch.randn(ROWS, WIDE).double(), torch.randint(CLASSES, (ROWS,))
    losses: dict[str, list[float]] = {}
    said: dict[str, Any] = {}
    for transport in ("auto", "gloo"):
        with elche.pipeline.Pipeline(
            wide_layers(), loss_of, micro_batches=4, seed=0, transport=transport
        ) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.2)
            started_s, losses[transport] = 0.0, []
            for step in range(STEPS):
                if step == WARM_UP:
                    started_s = time.perf_counter()
                losses[transport].append(float(pipe.step(x, y).loss or 0.0))
                optimizer.step()
                pipe.zero_grad()
            step_s = (time.perf_counter() - started_s) / (STEPS - WARM_UP)
            said[f"{transport}_step_ms"] = 1e3 * step_s
            peers = pipe._communicator.peers
            if transport == "auto" and peers is not None:
                said["by_devices"] = peers.transport.devices is not None
    model = nn.Sequential(*(make() for make in wide_layers()))
    reference = torch.optim.SGD(model.parameters(), lr=0.2)
    expected = []
    for _ in range(STEPS):
        loss = loss_of(model(x), y)
        loss.backward()
        reference.step()
        reference.zero_grad()
        expected.append(float(loss.detach()))
    found = {
        way: torch.tensor(each, dtype=torch.float64) for way, each in losses.items()
    }
    return (
        found,
        {way: torch.tensor(expected, dtype=torch.float64) for way in found},
        said,
    )


def wide_layers() -> list[Callable[[], nn.Module]]:
    """Factories of four layers whose outputs are large."""

    def make(index: int) -> nn.Module:
        torch.manual_seed(10 + index)
        return nn.Linear(WIDE, CLASSES if index == 3 else WIDE).double()

    return [lambda index=index: make(index) for index in range(4)]  # type: ignore[misc]


PARTS: dict[str, Callable[[], Result]] = {
    "ddp": ddp,
    "sync_batch_norm": sync_batch_norm,
    "replica": replica,
    "pipeline": pipeline,
    "messages": messages,
}


def difference(found: State, expected: State) -> float:
    """Relative L2 difference."""
    ours, theirs = (
        torch.cat([state[name].double().flatten() for name in expected])
        for state in (found, expected)
    )
    return float((ours - theirs).norm() / theirs.norm())


def main() -> None:
    """Runs a part and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    options = parser.parse_args()
    found, expected, said = PARTS[options.part]()
    if elche.is_main_process():
        print(
            json.dumps(
                {
                    "part": options.part,
                    "difference": difference(found, expected),
                    **said,
                }
            )
        )


if __name__ == "__main__":
    main()
