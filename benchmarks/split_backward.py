"""What splitting a backward pass costs: (I + W) / B, beside torch's own split.

    python benchmarks/split_backward.py --pairs 15 --json split.json
    python benchmarks/split_backward.py --sizes 64,2,32 512,4,64

One transformer block on one thread, from about a millisecond to a tenth of a second per
backward. *B* is a plain backward pass. elche computes the input gradient and puts the
weight gradients of known modules off (`elche.pipeline.split_backward.backward`);
torch's `stage_backward_input` and `stage_backward_weight` walk the graph twice. Forward
and backward of all three run in turn, in an order that rotates, each over the
microbatches of one step: the first finds no gradients, the others add to those that are
there, and both are reported. The table shows medians of the ratios within a turn, and
the 95 % interval of their mean; *F+I+W* is over the plain forward and backward, so that
nothing is gained by moving work into forward.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)

from benchmarks.paired import paired_interval
from elche.comm.transport.messages import Message
from elche.pipeline.split_backward.backward import StageBackward
from elche.pipeline.split_backward.guard import ContributionGuard
from elche.pipeline.stage import Layer, Stage

SIZES = ((64, 6, 32), (128, 8, 64), (256, 4, 128), (256, 8, 128), (256, 16, 128))
"""Width, samples and length of the blocks."""
WARM = 3
HEADS = 4
MICROBATCHES = 4
PHASES = ("first", "adding")
"""Microbatches of a step: the one that finds no gradient, and those that add to it."""
Times = list[tuple[float, float]]
"""Seconds of forward and of backward, by microbatch."""


class Contenders:
    """One block, run forward and backward in three ways.

    Args:
        width: of the block.
        samples: of a microbatch.
        length: tokens of a sample.
        guarded: whether elche checks the contributions, as it does by default.
    """

    def __init__(
        self, width: int, samples: int, length: int, guarded: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.block = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self._x = torch.randn(samples, length, width)
        self._gradient = torch.randn(samples, length, width)
        learning = dict(self.block.named_parameters())
        guard = ContributionGuard(0, learning, "bench") if guarded else None
        self._runner = StageBackward(
            Stage(0, [Layer("", self.block)], unpacks=True), guard
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
        given = Message((self._x,), ["t"], (True,))
        began_s = time.perf_counter()
        runner.keep(0, runner.forward(0, given, {}, is_split=True))
        ready_s = time.perf_counter()
        runner.backward_input(0, [self._gradient])
        runner.backward_weight(0)
        return ready_s - began_s, time.perf_counter() - ready_s

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

    def step(self, name: str) -> Times:
        """The microbatches of one step, from no gradients on."""
        self.block.zero_grad()
        if name == "elche":
            self._runner.begin_step()
        found = [getattr(self, name)() for _ in range(MICROBATCHES)]
        if name == "elche":
            self._runner.end_step()
        return found

    def turn(self, number: int) -> dict[str, Times]:
        """All three once, beginning with another one each time."""
        first = number % len(WAYS)
        return {name: self.step(name) for name in WAYS[first:] + WAYS[:first]}


WAYS = ("plain", "elche", "torch")


def check_equal(contenders: Contenders) -> float:
    """Largest relative difference of elche's weight gradients from the plain ones."""
    gradients = []
    for name in ("plain", "elche"):
        contenders.step(name)
        gradients.append([p.grad.clone() for p in _learned(contenders.block)])
    return max(
        float((one - other).norm() / one.norm())
        for one, other in zip(*gradients, strict=True)
    )


def _learned(module: nn.Module) -> list[Any]:
    return [p for p in module.parameters() if p.grad is not None]


def measure(contenders: Contenders, pairs: int) -> dict[str, Any]:
    """The figures of one size."""
    found: dict[str, Any] = {"difference": check_equal(contenders)}
    for number in range(WARM):
        contenders.turn(number)
    turns = [contenders.turn(number) for number in range(pairs)]
    for phase in PHASES:
        rows = [{way: _mean(turn[way], phase) for way in WAYS} for turn in turns]
        found[phase] = {
            "forward_ms": 1e3 * median(row["plain"][0] for row in rows),
            "backward_ms": 1e3 * median(row["plain"][1] for row in rows),
        }
        for way in WAYS[1:]:
            pairs_of = [(row[way], row["plain"]) for row in rows]
            found[phase][way] = {
                "forward": _ratios([a[0] / b[0] for a, b in pairs_of]),
                "backward": _ratios([a[1] / b[1] for a, b in pairs_of]),
                "both": _ratios([sum(a) / sum(b) for a, b in pairs_of]),
            }
    return found


def _mean(times: Times, phase: str) -> tuple[float, float]:
    chosen = times[:1] if phase == "first" else times[1:]
    forward_s, backward_s = (
        sum(one) / len(chosen) for one in zip(*chosen, strict=True)
    )
    return forward_s, backward_s


def _ratios(ratios: list[float]) -> dict[str, float]:
    spread = paired_interval(ratios, [0.0] * len(ratios))
    return {"median": median(ratios), "low": spread.low, "high": spread.high}


def _line(size: tuple[int, ...], phase: str, row: dict[str, Any]) -> str:
    elche, other = row[phase]["elche"], row[phase]["torch"]
    backward = elche["backward"]
    return (
        f"{','.join(map(str, size)):>12}  {phase:6} {row[phase]['backward_ms']:8.2f}   "
        f"{backward['median']:.3f} ({backward['low']:.3f} to {backward['high']:.3f})"
        f"{other['backward']['median']:9.3f}{elche['forward']['median']:10.3f}"
        f"{elche['both']['median']:10.3f}"
    )


def _size(text: str) -> tuple[int, int, int]:
    width, samples, length = map(int, text.split(","))
    return width, samples, length


def main() -> int:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--sizes",
        type=_size,
        nargs="+",
        default=SIZES,
        help="width,samples,length of each block",
    )
    parser.add_argument("--no-guard", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'size':>12}  phase  {'B ms':>8}   {'(I+W)/B':22}"
        f"{'torch':>9}{'F/plain':>10}{'F+I+W':>10}"
    )
    rows = []
    for size in args.sizes:
        width, samples, length = size
        contenders = Contenders(width, samples, length, guarded=not args.no_guard)
        row = measure(contenders, args.pairs)
        rows.append({"size": size, **row})
        for phase in PHASES:
            print(_line(size, phase, row), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
