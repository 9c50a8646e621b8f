"""What gradients under ``sync`` send over the link of each of two hosts.

    python -m benchmarks.host_sums --ranks 2,2 --link-mbit 100

Each host is a network namespace (Linux, root) whose cable `tc tbf` limits; what the
cable has carried is counted between two steps. ``flat``: every rank counts as a host of
its own, so that all sum in one ring; ``hosts``: inside the hosts first. Beside them
stand what rings send, and the least seconds that this takes at the link's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from benchmarks.links.namespaces import SENT_BYTES, slow_link
from benchmarks.record import write_record

ROOT = Path(__file__).parents[1]
WIDTH, LAYERS = 400, 15
MODEL_BYTES = 4 * WIDTH * WIDTH * LAYERS
"""2.4 M float32 parameters: 9.6 MB of gradients."""
BATCH = 32
WARM = 3
"""Steps before counting: the first ones order buckets."""
WAIT_S = 300.0
WAYS = ("flat", "hosts")


def ring_share(members: int) -> float:
    """Of a message what each member of a ring sends to the next one."""
    return 2.0 * (members - 1) / members


def train(way: str, steps: int, folder: Path) -> None:
    """On each rank: trains, and says what its host's cable has carried for a step."""
    rank = int(os.environ["RANK"])
    if way == "flat":
        os.environ["ELCHE_HOST"] = f"rank {rank}"
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model: Any = nn.Sequential(*layers)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(BATCH * steps, WIDTH))
    loader: Any = DataLoader(data, BATCH)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, policy="sync", epochs=1, leave_out=False
    )
    seen: list[tuple[int, float]] = []
    for step, (x,) in enumerate(loader):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (WARM, steps - 1):
            seen.append((int(SENT_BYTES.read_text()), time.monotonic()))
    elche.shutdown()
    if os.environ["LOCAL_RANK"] == "0":
        (first, began_s), (last, ended_s) = seen
        counted = steps - 1 - WARM
        found = {
            "bytes_per_step": (last - first) / counted,
            "seconds_per_step": (ended_s - began_s) / counted,
        }
        Path(folder, f"{rank}.json").write_text(json.dumps(found))


def measure(
    way: str, ranks: Sequence[int], steps: int, mbit: float
) -> list[dict[str, float]]:
    """A run over two hosts; what each of them sent for a step, and how long it took."""
    with tempfile.TemporaryDirectory() as name, slow_link(len(ranks), mbit) as link:
        first = [sum(ranks[:number]) for number in range(len(ranks))]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        common = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "ELCHE_LISTEN": "auto",
            "WORLD_SIZE": str(sum(ranks)),
            "MASTER_ADDR": link.ranks[0][1],
            "MASTER_PORT": "29500",
        }
        started = []
        for number, count in enumerate(ranks):
            for place in range(count):
                script = [__file__, "--train", way, "--steps", str(steps)]
                own = {
                    "RANK": str(first[number] + place),
                    "LOCAL_RANK": str(place),
                    "LOCAL_WORLD_SIZE": str(count),
                }
                process = subprocess.Popen(
                    [*link.command(number), sys.executable, *script, "--folder", name],
                    env={**common, **own},
                )
                started.append(process)
        try:
            codes = [each.wait(WAIT_S) for each in started]
        finally:
            for each in started:
                each.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with codes {codes}")
        return [json.loads(Path(name, f"{rank}.json").read_text()) for rank in first]


def main() -> int:
    """Measures, prints, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,2", help="of each host")
    parser.add_argument("--link-mbit", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.steps, args.folder)
        return 0
    ranks = [*map(int, args.ranks.split(","))]
    members = {"flat": sum(ranks), "hosts": len(ranks)}
    figures = {}
    print(f"{args.ranks} ranks, {MODEL_BYTES / 1e6:g} MB, {args.link_mbit:g} Mbit/s")
    for way in args.ways.split(","):
        found = measure(way, ranks, args.steps, args.link_mbit)
        ring = ring_share(members[way]) * MODEL_BYTES
        sent = [each["bytes_per_step"] for each in found]
        least_s = max(sent) * 8e-6 / args.link_mbit
        took_s = max(each["seconds_per_step"] for each in found)
        figures[way] = {"ring_bytes": ring, "sent_bytes": sent, "seconds": took_s}
        print(
            f"{way:6} ring {ring / 1e6:.2f} MB per step and direction; carried "
            + ", ".join(f"{each / 1e6:.2f}" for each in sent)
            + f" MB; at the link's rate {least_s:.3f} s, took {took_s:.3f} s"
        )
    write_record(args.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
