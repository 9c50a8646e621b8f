"""Measurements of one rank for ``elche doctor``, which starts this as a module."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise

import torch
from torch import Tensor, nn

from elche.by_hand.replica import init_group
from elche.cli.doctor_findings import RankReport, cost_of_steps
from elche.comm.transport.exchange import Exchange, GlooExchange, open_exchange
from elche.comm.transport.probe import probe_reduction_s
from elche.comm.transport.process_group import Group
from elche.runtime.emulation import EmulationHandle, emulate
from elche.runtime.process.environment import Placement, read_placement

MARK = "elche doctor: "
"""Begins the line that carries a rank's report."""
MATMUL_SIZE = 1024
LINK_ELEMENTS = 1 << 20
ROUNDS = 5
MOST_S = 2.0
"""After so long no round is repeated."""
STATE_BYTES = 16
"""Bytes per parameter: itself, its gradient and two moments of Adam, in float32."""
USABLE = 0.8
"""Part of the free memory that is counted on."""


def main() -> None:
    """Prints the report of this rank: arguments are parameters and batch size."""
    parameters, batch_size = int(sys.argv[1]), int(sys.argv[2])
    group, placement = init_group(timeout_s=120.0), read_placement()
    device = placement.device
    matrix = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device)
    matmul_s = _quickest(group, lambda: (matrix @ matrix)[0, 0].item())
    network = sized_network(parameters).to(device)
    sample_bytes = saved_bytes(network, device)
    emulation = None
    if placement.emulation is not None:
        emulation = emulate(network, placement.emulation)
    step = _stepper(network, device)
    sizes = {batch_size, max(1, batch_size // 4)}
    times_s = {size: _quickest(group, step(size)) for size in sorted(sizes)}
    sample_s, fixed_s = cost_of_steps(times_s)
    free_bytes = _free_bytes(placement)
    state_bytes = STATE_BYTES * sum(p.numel() for p in network.parameters())
    room_bytes = USABLE * free_bytes - state_bytes
    report = RankReport(
        rank=group.rank,
        device=str(device),
        name=placement.device_name,
        matmul_tflops=2 * MATMUL_SIZE**3 / matmul_s / 1e12,
        sample_s=sample_s,
        fixed_s=fixed_s,
        free_bytes=free_bytes,
        largest_batch=max(0, int(room_bytes / sample_bytes)),
        overrun=_overrun(emulation),
        links=_links(group) if group.world_size > 1 else {},
        reduction_s=probe_reduction_s(group, state_bytes // STATE_BYTES),
    )
    print(MARK + json.dumps(asdict(report)), flush=True)


def sized_network(parameters: int) -> nn.Sequential:
    """A chain of equal linear layers with about so many parameters."""
    depth = max(2, math.ceil(parameters / 2048**2))
    width = max(1, round(math.sqrt(parameters / depth)))
    pairs = ((nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def saved_bytes(network: nn.Sequential, device: torch.device) -> int:
    """Bytes per sample that a training step holds: input, and what backward needs.

    Counted twice, because gradients of activations come beside them.
    """
    samples = 8
    own = {p.data_ptr() for p in network.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    batch = _batch(network, samples, device)
    inputs = batch.numel() * batch.element_size()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(batch).sum()
    return max(1, 2 * (inputs + sum(kept.values())) // samples)


def _batch(network: nn.Sequential, samples: int, device: torch.device) -> Tensor:
    width = next(network.parameters()).shape[1]
    return torch.randn(samples, width, device=device)


def _stepper(
    network: nn.Sequential, device: torch.device
) -> Callable[[int], Callable[[], None]]:
    """Makes training steps of so many samples, each through at its return."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)

    def of_size(samples: int) -> Callable[[], None]:
        batch = _batch(network, samples, device)

        def step() -> None:
            optimizer.zero_grad()
            network(batch).square().mean().backward()
            optimizer.step()
            float(next(network.parameters()).detach().flatten()[0])  # waits for it

        return step

    return of_size


def _quickest(group: Group, work: Callable[[], object]) -> float:
    """Seconds of the quickest of some rounds, while all ranks do the same."""
    work()
    group.all_reduce(torch.zeros(1, device="cpu"), "beginning to measure together")
    times_s = [time.perf_counter()]
    while len(times_s) <= ROUNDS and times_s[-1] - times_s[0] < MOST_S:
        work()
        times_s.append(time.perf_counter())
    return min(after - before for before, after in pairwise(times_s))


def _links(group: Group) -> dict[str, tuple[float, float]]:
    """Latency and bytes per second of what these ranks may use."""
    found, cpu = {}, torch.device("cpu")
    for transport in ("shared memory", "gloo") if group.shares_host else ("gloo",):
        make = open_exchange if transport == "shared memory" else GlooExchange
        latency_s, whole_s = (
            _message_s(group, make(group, numel, torch.float32, cpu, sides=2))
            for numel in (1, LINK_ELEMENTS)
        )
        rate = 4 * LINK_ELEMENTS / max(whole_s - latency_s, 1e-9)
        found[transport] = latency_s, rate
    return found


def _message_s(group: Group, exchange: Exchange) -> float:
    """Seconds of the quickest of some messages; all ranks send as many."""
    quickest_s = math.inf
    for number in range(ROUNDS + 1):
        group.all_reduce(torch.zeros(1, device="cpu"), "beginning a message together")
        started_s = time.perf_counter()
        exchange.begin(number % 2)
        exchange.finish("measuring the link")
        quickest_s = min(quickest_s, time.perf_counter() - started_s)
    return quickest_s


def _free_bytes(placement: Placement) -> int:
    """Memory for this rank; ranks of the CPU divide the host's."""
    if placement.device.type == "cuda":
        return torch.cuda.mem_get_info(placement.device)[0]
    free = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else None
    pages = os.sysconf(free or "SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // placement.world_size


def _overrun(emulation: EmulationHandle | None) -> float:
    if emulation is None or not emulation.nominal_s:
        return 0.0
    return emulation.overrun_s / emulation.nominal_s


if __name__ == "__main__":
    main()
