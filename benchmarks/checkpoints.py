"""Throughput with a checkpoint every few seconds beside without, on emulated devices.

Pairs of runs, in turn, each beside a run of the two devices alone and at once (indep),
which shows what the machine does meanwhile; a run is timed from its 20th batch on.

``python benchmarks/checkpoints.py --cpu`` prints what one costs of a processor.

Run: ``python benchmarks/checkpoints.py --pairs 5 --steps 1500 --every 10``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev

WARM_BATCHES = 20
SPEEDS = (1.0, 0.5)


def train(steps: int, every_s: float, folder: str) -> None:
    """What a rank runs; rank 0 prints samples per second of the run, and the pauses."""
    import torch
    from torch import nn

    import elche

    torch.manual_seed(0)
    layers = [nn.Linear(512, 1400), nn.ReLU(), nn.Linear(1400, 1024), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(1024, 10))
    data = torch.utils.data.TensorDataset(
        torch.randn(64000, 512), torch.randint(10, (64000,))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = elche.setup(model, optimizer, loader, leave_out=False)
    if every_s:
        elche.save_every(folder, every_s=every_s)
    began_s = before = 0.0
    for number, (x, y) in enumerate(loader.steps(steps)):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == WARM_BATCHES:
            began_s, before = time.monotonic(), elche.progress_samples()
    if elche.is_main_process():
        passed_s = time.monotonic() - began_s
        print((elche.progress_samples() - before) / passed_s, flush=True)


def cpu(checkpoints: int = 8) -> None:
    """Prints what a checkpoint costs of a processor, on one device."""
    import torch
    from torch import nn

    import elche

    torch.set_num_threads(1)
    layers = [nn.Linear(512, 1400), nn.ReLU(), nn.Linear(1400, 1024), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(64, 512))
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    model, optimizer, loader = elche.setup(model, optimizer, loader)
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
    own_s, all_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(checkpoints):
            before_s = time.process_time()
            began_s = time.thread_time()
            elche.save(folder)
            own_s.append(time.thread_time() - began_s)
            newest = f"*{number + 1}/manifest.json"
            while not list(Path(folder).glob(newest)):  # written last, in a thread
                time.sleep(0.05)
            all_s.append(time.process_time() - before_s)
        elche.shutdown()
    print(
        f"training thread {1e3 * fmean(own_s):.1f} ms, all {1e3 * fmean(all_s):.1f} ms"
    )


def measure(steps: int, every_s: float, policy: str) -> float:
    """Samples per second of one run."""
    with tempfile.TemporaryDirectory() as folder:
        speeds = ",".join(map(str, SPEEDS))
        options = f"elche run --speeds {speeds} --policy {policy} {__file__} --rank"
        words = ("-m", *options.split(), str(steps), str(every_s), folder)
        ended = subprocess.run(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True
        )
        made = len(list(Path(folder).glob("checkpoint-*/manifest.json")))
    if every_s and not made:
        raise RuntimeError("no checkpoint was made")
    return float(ended.stdout.split()[-1])


def measure_indep(steps: int) -> float:
    """Samples per second of the devices that train alone, at the same time."""
    alone = []
    for speed in SPEEDS:
        own = str(round(steps * speed / sum(SPEEDS)))
        words = (sys.executable, __file__, "--rank", own, "0.0", "")
        env = os.environ | {"ELCHE_SPEED": str(speed), "OMP_NUM_THREADS": "1"}
        alone.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        )
    return sum(float(each.communicate()[0].split()[-1]) for each in alone)


def main() -> None:
    """Prints each pair, and the mean ratio with its standard error."""
    if sys.argv[1:2] == ["--rank"]:
        train(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
        return
    if sys.argv[1:] == ["--cpu"]:
        cpu()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--policy", default="sync")
    asked = parser.parse_args()
    ratios = []
    for pair in range(asked.pairs):
        order = (0.0, asked.every) if pair % 2 else (asked.every, 0.0)
        rates = {each: measure(asked.steps, each, asked.policy) for each in order}
        ratios.append(rates[asked.every] / rates[0.0])
        said = f"{rates[0.0]:.1f} without, {rates[asked.every]:.1f} with"
        indep = measure_indep(asked.steps)
        print(f"{said}, {indep:.1f} indep, samples/s", flush=True)
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    print(f"with/without {fmean(ratios):.4f} +- {error:.4f} (standard error)")


if __name__ == "__main__":
    main()
