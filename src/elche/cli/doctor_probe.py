"""Measurements of one rank for ``elche doctor``, which starts this as a module."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from elche.by_hand.replica import init_group
from elche.cli.doctor_findings import RankReport, cost_of_steps
from elche.comm.transport.exchange import GlooExchange, open_exchange
from elche.comm.transport.probe import message_times_s, probe_reduction_s
from elche.comm.transport.process_group import Group
from elche.runtime.emulation import emulate
from elche.runtime.process.environment import read_placement

MARK = "elche doctor: "
"""Prefix of the line with a rank's report."""
LINK_ELEMENTS = 1 << 20
ROUNDS = 5
MOST_S = 2.0
"""Time (s) after which no further round is started."""


def main() -> None:
    """Prints this rank's report; the arguments are parameters and batch size."""
    parameters, batch_size = int(sys.argv[1]), int(sys.argv[2])
    group, placement = init_group(timeout_s=120.0), read_placement()
    device = placement.device
    network = sized_network(parameters).to(device)
    emulation = None
    if placement.emulation is not None:
        emulation = emulate(network, placement.emulation)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    width, times_s = next(network.parameters()).shape[1], {}
    for size in sorted({batch_size, max(1, batch_size // 4)}):
        batch = torch.randn(size, width, device=device)
        step = partial(_train, network, optimizer, batch)
        times_s[size] = _quickest(group, step)
    sample_s, fixed_s = cost_of_steps(times_s)
    overrun_s = emulation.overrun_s if emulation else 0.0
    report = RankReport(
        rank=group.rank,
        device=str(device),
        name=placement.device_name,
        sample_s=sample_s,
        fixed_s=fixed_s,
        overrun=overrun_s / emulation.nominal_s if emulation else 0.0,
        links=_links(group) if group.world_size > 1 else {},
        reduction_s=probe_reduction_s(
            group, sum(p.numel() for p in network.parameters())
        ),
    )
    print(MARK + json.dumps(asdict(report)), flush=True)


def sized_network(parameters: int) -> nn.Sequential:
    """A chain of equal linear layers with about this number of parameters."""
    depth = max(2, math.ceil(parameters / 2048**2))
    width = max(1, round(math.sqrt(parameters / depth)))
    pairs = ((nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def _train(
    network: nn.Sequential, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> None:
    """Takes a training step, and waits for its end."""
    optimizer.zero_grad()
    network(batch).square().mean().backward()
    optimizer.step()
    float(next(network.parameters()).detach().flatten()[0])  # synchronises


def _quickest(group: Group, work: Callable[[], object]) -> float:
    """Seconds of the quickest round, while all ranks work at the same time."""
    work()
    group.all_reduce(torch.zeros(1, device="cpu"), "beginning to measure together")
    times_s = [time.perf_counter()]
    while len(times_s) <= ROUNDS and times_s[-1] - times_s[0] < MOST_S:
        work()
        times_s.append(time.perf_counter())
    return min(after - before for before, after in pairwise(times_s))


def _links(group: Group) -> dict[str, tuple[float, float]]:
    """Latency and bytes per second of each transport available to these ranks."""
    found, cpu = {}, torch.device("cpu")
    for transport in ("shared memory", "gloo") if group.shares_host else ("gloo",):
        make = open_exchange if transport == "shared memory" else GlooExchange
        latency_s, whole_s = (
            message_times_s(group, make(group, numel, torch.float32, cpu, 1), ROUNDS)[0]
            for numel in (1, LINK_ELEMENTS)
        )
        rate = 4 * LINK_ELEMENTS / max(whole_s - latency_s, 1e-9)
        found[transport] = latency_s, rate
    return found


if __name__ == "__main__":
    main()
