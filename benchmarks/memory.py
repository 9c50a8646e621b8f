"""Host memory of a rank, beside plain PyTorch training of the same model.

Two CPU ranks train 20 M parameters with AdamW; after some steps each reads its
proportional set size (`/proc/self/smaps_rollup`), in which memory that ranks share is
divided among them. What a contender holds beyond plain training is given in copies of
the model.

    python benchmarks/memory.py [--contenders plain,ddp,sync,...] [--steps 30]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, DEPTH, BATCH = 1414, 10, 8
CONTENDERS = ("plain", "ddp", "elche-ddp", "sync", "cadence", "async", "async-int8")


def main() -> None:
    """Runs every contender and prints a table; or, in a rank, trains as one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--parts", action="store_true", help="kinds of memory")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        train(given.rank_of, given.steps)
        return
    plain_bytes = model_bytes = 0.0
    print("| contender | PSS per rank, MB | beyond plain, MB | in models |")
    print("|---|---|---|---|")
    for contender in given.contenders.split(","):
        ranks = measured(contender, given.steps)
        held_bytes = sum(rank["pss"] for rank in ranks) / len(ranks)
        model_bytes = ranks[0]["model"]
        plain_bytes = plain_bytes or held_bytes
        extra = held_bytes - plain_bytes
        figures = f"{held_bytes / 1e6:.0f} | {extra / 1e6:.0f}"
        print(f"| {contender} | {figures} | {extra / model_bytes:.2f} |", flush=True)
        if given.parts:
            print(json.dumps(ranks))


def measured(contender: str, steps: int) -> list[dict[str, float]]:
    """What each rank of a contender read."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__, "--rank-of", contender]
    command += ["--steps", str(steps)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    found = re.findall(r"^HELD (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or len(found) != 2:
        sys.exit(f"{contender}: {done.stdout}\n{done.stderr}")
    sys.stderr.write(
        "".join(
            re.findall(r"^elche: 2 dev.*\n", done.stderr + done.stdout, re.MULTILINE)
        )
    )
    return [json.loads(line) for line in found]


def train(contender: str, steps: int) -> None:
    """One rank."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())
    ]
    model: nn.Module = nn.Sequential(*layers)
    model_bytes = sum(p.numel() * 4 for p in model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(BATCH * steps * 4, WIDTH))
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(data, BATCH)
    if contender == "plain":
        pass
    elif contender == "ddp":
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    elif contender == "elche-ddp":
        import elche

        torch.distributed.init_process_group("gloo")
        model = elche.DistributedDataParallel(model)
    else:
        import elche

        policy, _, codec = contender.partition("-")
        extra = {"codec": codec} if codec else {}
        model, optimizer, loader = elche.setup(
            model, optimizer, loader, epochs=1, policy=policy, **extra
        )
    done = 0
    for (x,) in loader:
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == steps:
            print("HELD " + json.dumps({**held(), "model": model_bytes}), flush=True)
    if done < steps:
        print("HELD " + json.dumps({**held(), "model": model_bytes}), flush=True)


def held() -> dict[str, float]:
    """This process's proportional set size in bytes, and what it is made of."""
    kinds: dict[str, float] = {"pss": 0.0}
    kind = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
                words = line.split(maxsplit=5)
                name = words[5] if len(words) > 5 else "anonymous"
                kind = (
                    "memfd" if "memfd" in name else name if name[0] in "a[" else "files"
                )
            elif line.startswith("Pss:"):
                kinds[kind] = kinds.get(kind, 0.0) + 1024 * int(line.split()[1])
                kinds["pss"] += 1024 * int(line.split()[1])
    return kinds


if __name__ == "__main__":
    main()
