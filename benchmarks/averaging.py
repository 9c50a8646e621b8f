"""What averaging parameters moves and takes, beside gloo's all-reduce of one tensor.

    python benchmarks/averaging.py --ranks 2 --numel 10000000 --json averaging.json

The parameters are 150 tensors; the optimizer's state stays local. Per synchronisation:
bytes that left this rank's interface, counted by the kernel where all ranks have a
network namespace to themselves (`--wire`, Linux, root), and seconds of the slowest
rank, the median of `--rounds`, contenders taking turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import write_record
from torch import distributed as dist
from torch import nn

from elche.comm.averaging.averaging import ParameterAverager
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce

TENSORS = 150
RANK_TIMEOUT_S = 300.0
CONTENDERS = ("raw all-reduce", "averaging, gloo", "averaging, shared memory")


def wire_bytes() -> int:
    """Bytes that have left on the loopback interface of this network namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith("lo:")).split()
    return int(fields[9])


def model_of(numel: int) -> nn.ParameterList:
    """Parameters of a few sizes, about so many elements in all."""
    torch.manual_seed(0)
    each = numel // TENSORS
    sizes = [each // 2 if index % 3 else 2 * each for index in range(TENSORS)]
    return nn.ParameterList([torch.randn(size) for size in sizes])


def plan(rank: int, window: int, world_size: int) -> Reduce:
    """A reduction in which all ranks weigh alike."""
    return Reduce(
        rank=rank,
        epoch=0,
        window=window,
        attempt=0,
        weight=1.0 / world_size,
        active_ranks=world_size,
        include_state=False,
        buffers=(),
        outer="nesterov",
        outer_lr=0.7,
        outer_momentum=0.5,
    )


def contender(name: str, group: Group, numel: int) -> Callable[[int], None]:
    """What one synchronisation is."""
    model = model_of(numel)
    if name == "raw all-reduce":
        flat = torch.cat([p.detach().flatten() for p in model])
        return lambda window: group.all_reduce(flat, "a benchmark")
    group.shares_host = "shared" in name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = ParameterAverager(list(model), model, lambda: [optimizer], group)
    averager.build()

    def synchronise(window: int) -> None:
        averager.synchronise(plan(group.rank, window, group.world_size))

    return synchronise


def run_rank(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints its figures."""
    torch.set_num_threads(1)
    settings = dist.ProcessGroupGloo._Options()
    settings._timeout = timedelta(seconds=120)
    settings._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = dist.FileStore(str(Path(options.folder) / "store"), options.ranks)
    made = dist.ProcessGroupGloo(store, options.rank, options.ranks, settings)
    group = Group(made, options.rank, options.ranks, 120.0)
    ready = {name: contender(name, group, options.numel) for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    moved: dict[str, list[int]] = {name: [] for name in CONTENDERS}
    for window in range(options.rounds + 1):
        for name, synchronise in ready.items():
            group.all_reduce(torch.zeros(1), "beginning together")
            before, started_s = wire_bytes(), time.perf_counter()
            synchronise(window)
            taken = torch.zeros(group.world_size, dtype=torch.float64)
            taken[group.rank] = time.perf_counter() - started_s
            group.all_reduce(taken, "comparing times")
            if window:  # the first one warms up
                times[name].append(float(taken.max()))
                moved[name].append(wire_bytes() - before)
    group.close()
    if options.rank == 0:
        figures = {
            name: {
                "seconds": median(times[name]),
                "wire_bytes": median(moved[name]) if options.wire else None,
            }
            for name in CONTENDERS
        }
        print(json.dumps(figures))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Starts the ranks; the figures of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, __file__, "--folder", folder),
            *("--ranks", str(options.ranks), "--numel", str(options.numel)),
            *("--rounds", str(options.rounds)),
            *(["--wire"] if options.wire else []),
        ]
        script = 'for rank in $(seq 1 $0); do "$@" --rank $rank & done; "$@" --rank 0'
        shell = ["sh", "-c", script + "; wait", str(options.ranks - 1), *command]
        if options.wire:
            inside = 'ip link set lo up && exec "$@"'
            shell = ["unshare", "--net", "sh", "-c", inside, "sh", *shell]
        done = subprocess.run(
            shell,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            timeout=RANK_TIMEOUT_S,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--wire", action="store_true", help="count bytes on the wire")
    parser.add_argument("--json", type=Path, default=None)
    for internal in ("--rank", "--folder"):
        parser.add_argument(internal, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        options.rank = int(options.rank)
        run_rank(options)
        return
    figures = measure(options)
    raw = figures["raw all-reduce"]
    print(f"{options.ranks} ranks, {options.numel} elements in {TENSORS} tensors")
    print(f"{'':26} ms of one  x raw  MB on the wire  x raw")
    for name, row in figures.items():
        line = f"{name:26} {1e3 * row['seconds']:9.1f} "
        line += f"{row['seconds'] / raw['seconds']:6.2f}"
        if row["wire_bytes"] is not None:
            ratio = row["wire_bytes"] / raw["wire_bytes"]
            line += f" {row['wire_bytes'] / 1e6:15.2f} {ratio:6.3f}"
        print(line)
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
