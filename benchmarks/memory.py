"""Host memory of a rank, beside plain PyTorch training of the same model.

Two CPU ranks train 20 M parameters with AdamW. At the end of a step, where gradients
are, each reads its proportional set size, in which memory that ranks share is divided
among them: as it is in the first half of the steps, and without what malloc holds free
(`malloc_trim`), which differs by half a model from run to run, in the second. What a
contender holds beyond plain training is given in copies of the model, and beside it
what it says itself that reductions hold. A contender is a policy, with `-gloo` not in
shared memory, and with a codec's name.

    python benchmarks/memory.py [--contenders plain,ddp,sync,...] [--steps 20]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, DEPTH, BATCH = 1414, 10, 8
CONTENDERS = "plain,ddp,elche-ddp,sync,sync-gloo,cadence,async,async-int8,async-bf16"


def main() -> None:
    """Runs every contender and prints a table; or, in a rank, trains as one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contenders", default=CONTENDERS, help="the first is plain")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        train(given.rank_of, given.steps)
        return
    plain: list[float] = []
    print(
        "| contender | PSS per rank, MB | models beyond plain | without free memory "
        "| said |"
    )
    print("|---|---|---|---|---|")
    for contender in given.contenders.split(","):
        ranks = measured(contender, given.steps)
        held, live, model, said = (
            sum(column) / len(ranks) for column in zip(*ranks, strict=True)
        )
        plain = plain or [held, live]
        beyond = f"{(held - plain[0]) / model:.1f} | {(live - plain[1]) / model:.1f}"
        figures = f"{held / 1e6:.0f} | {beyond} | {said / model:.2f}"
        print(f"| {contender} | {figures} |", flush=True)


def measured(contender: str, steps: int) -> list[list[float]]:
    """Bytes held, live, and of the model, as each rank of a contender read them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__, "--rank-of", contender]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--steps", str(steps)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.findall(r"HELD (\[.*?\])", done.stdout)  # lines may be torn
    if done.returncode or len(found) < 2:
        sys.exit(f"{contender}: {done.stdout}\n{done.stderr}")
    said = re.findall(r"^elche: 2 dev.*\n", done.stderr, re.MULTILINE)
    sys.stderr.write("".join(said))
    return [json.loads(line) for line in found[-2:]]


def train(contender: str, steps: int) -> None:
    """One rank; prints what it holds in the last batch of each half."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    model: nn.Module = nn.Sequential(*layers)
    model_bytes = sum(p.numel() * 4 for p in model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(BATCH * steps, WIDTH))
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(data, BATCH)
    if contender.endswith("ddp"):
        torch.distributed.init_process_group("gloo")
    if contender == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif contender != "plain":
        import elche

        if contender == "elche-ddp":
            model = elche.DistributedDataParallel(model)
        else:
            policy, *words = contender.split("-")
            kind = "gloo" if "gloo" in words else "auto"
            options: dict[str, Any] = {
                "transport": elche.config.TransportConfig(kind=kind)
            }
            for codec in set(words) - {"gloo"}:
                options["codec"] = codec
            model, optimizer, loader = elche.setup(
                model, optimizer, loader, epochs=1, policy=policy, **options
            )
    held: list[float] = [0.0, 0.0, model_bytes]
    said = 0
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        if step < steps // 2:
            held[0] = pss_bytes()
        else:  # what it gives back would be missing from the other figure
            held[1] = live_bytes()
    assert held[1], f"a rank had fewer than {steps // 2} batches: more --steps"
    if contender not in ("plain", "ddp", "elche-ddp"):
        said = elche.summary().reduction_bytes
    held.append(said)
    print(f"HELD {json.dumps(held)}", flush=True)


def pss_bytes() -> int:
    """This process's proportional set size."""
    found = re.search(
        r"^Pss: +(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M
    )
    assert found is not None
    return 1024 * int(found[1])


def live_bytes() -> int:
    """The same, when malloc has given back what is free (glibc)."""
    ctypes.CDLL(None).malloc_trim(0)
    return pss_bytes()


if __name__ == "__main__":
    main()
