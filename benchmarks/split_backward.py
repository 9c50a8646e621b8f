"""What splitting a backward pass costs: (I + W) / B, beside torch's own split.

    python benchmarks/split_backward.py --pairs 15 --json split.json

One transformer block on one thread, from about a millisecond to a tenth of a second per
backward. *B* is a plain backward pass. elche computes the input gradient and puts the
weight gradients off at the operation itself (`elche.pipeline.backward`); torch's
`stage_backward_input` and `stage_backward_weight` walk the graph twice. Forward and
backward of all three run in turn, in an order that rotates; the table shows medians of
the ratios within a turn, and the 95 % interval of their mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)

from elche.monitor.table import paired_interval
from elche.pipeline.backward import StageBackward
from elche.pipeline.guard import ContributionGuard
from elche.pipeline.messages import Message
from elche.pipeline.stage import Layer, Stage

SIZES = ((64, 6, 32), (128, 8, 64), (256, 4, 128), (256, 8, 128), (256, 16, 128))
"""Width, samples and length of the blocks."""
WARM = 3
HEADS = 4


class Contenders:
    """One block, run forward and backward in three ways.

    Args:
        width: of the block.
        samples: of a microbatch.
        length: tokens of a sample.
    """

    def __init__(self, width: int, samples: int, length: int) -> None:
        torch.manual_seed(0)
        self.block = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self._x = torch.randn(samples, length, width)
        self._gradient = torch.randn(samples, length, width)
        learning = dict(self.block.named_parameters())
        self._runner = StageBackward(
            Stage(0, [Layer("", self.block)], unpacks=True),
            ContributionGuard(0, learning, "bench"),
        )

    def plain(self) -> tuple[float, float]:
        """Seconds of forward, and of one backward pass."""
        x = self._x.clone().requires_grad_()
        began_s = time.perf_counter()
        y = self.block(x)
        ready_s = time.perf_counter()
        y.backward(self._gradient)
        return ready_s - began_s, time.perf_counter() - ready_s

    def elche(self) -> tuple[float, float]:
        """Seconds of forward, and of I and W together."""
        runner = self._runner
        runner.begin_step()
        given = Message((self._x,), ["t"], (True,))
        began_s = time.perf_counter()
        runner.keep(0, runner.forward(0, given, {}, is_split=True))
        ready_s = time.perf_counter()
        runner.backward_input(0, [self._gradient])
        runner.backward_weight(0)
        ended_s = time.perf_counter()
        runner.end_step()
        return ready_s - began_s, ended_s - ready_s

    def torch(self) -> tuple[float, float]:
        """The same with torch's split."""
        x = self._x.clone().requires_grad_()
        began_s = time.perf_counter()
        y = self.block(x)
        ready_s = time.perf_counter()
        weights = list(self.block.parameters())
        _, groups = stage_backward_input([y], [self._gradient], [x], iter(weights))
        stage_backward_weight(iter(weights), groups)
        return ready_s - began_s, time.perf_counter() - ready_s

    def turn(self, number: int) -> dict[str, tuple[float, float]]:
        """All three once, beginning with another one each time."""
        ways = [("plain", self.plain), ("elche", self.elche), ("torch", self.torch)]
        first = number % len(ways)
        found = {}
        for name, run in ways[first:] + ways[:first]:
            self.block.zero_grad()
            found[name] = run()
        return found


def check_equal(contenders: Contenders) -> float:
    """Largest relative difference of elche's weight gradients from the plain ones."""
    gradients = []
    for run in (contenders.plain, contenders.elche):
        contenders.block.zero_grad()
        run()
        gradients.append([p.grad.clone() for p in _learned(contenders.block)])
    return max(
        float((one - other).norm() / one.norm())
        for one, other in zip(*gradients, strict=True)
    )


def _learned(module: nn.Module) -> list[Any]:
    return [p for p in module.parameters() if p.grad is not None]


def measure(size: tuple[int, int, int], pairs: int) -> dict[str, Any]:
    """The figures of one size."""
    contenders = Contenders(*size)
    difference = check_equal(contenders)
    for number in range(WARM):
        contenders.turn(number)
    turns = [contenders.turn(number) for number in range(pairs)]
    found: dict[str, Any] = {"size": size, "difference": difference}
    for place, what in ((1, "backward"), (0, "forward")):
        plain = [turn["plain"][place] for turn in turns]
        found[f"{what}_ms"] = 1e3 * sorted(plain)[len(plain) // 2]
        for name in ("elche", "torch"):
            own = [turn[name][place] for turn in turns]
            ratios = sorted(a / b for a, b in zip(own, plain, strict=True))
            spread = paired_interval(ratios, [0.0] * len(ratios))
            found[f"{name}_{what}"] = [spread.low, spread.high]
            found[f"{name}_{what}_median"] = ratios[len(ratios) // 2]
    return found


def main() -> int:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("backward ms   elche (I+W)/B           torch's split   elche's forward")
    rows = []
    for size in SIZES:
        row = measure(size, args.pairs)
        rows.append(row)
        low, high = row["elche_backward"]
        print(
            f"{row['backward_ms']:11.2f}   {row['elche_backward_median']:.3f} "
            f"({low:.3f} to {high:.3f})   {row['torch_backward_median']:13.3f} "
            f"{row['elche_forward_median']:17.3f}",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
