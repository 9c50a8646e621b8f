"""What it takes to plan a pipeline, and to choose a policy for many ranks.

    OMP_NUM_THREADS=1 python benchmarks/planning.py --json planning.json

Processor seconds of this process, the least of several calls. The bars: a schedule for
8 ranks and 32 microbatches, all placements together, in 0.1 s and one for 64 ranks and
512 microbatches in 5 s; 48 layers on 8 devices in 2 s; a choice for ten thousand ranks
in 0.5 s. That plans are near the ideal, and what a choice costs in lines of Python run,
are tests (`tests/schedule/`, `tests/cadence/test_chooser.py`).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import write_record

from elche.cadence.chooser import Chooser
from elche.cadence.goodput import MeasuredCluster
from elche.schedule.costs import RankTimes
from elche.schedule.generators.auto import auto_placed
from elche.schedule.planning.gpt_profile import GptSize, gpt_layers
from elche.schedule.planning.plan import PlanConfig
from elche.schedule.planning.planner import plan_pipeline
from elche.schedule.planning.profile import (
    ANY_KIND,
    DeviceProfile,
    LinkProfile,
    PipelineProfile,
)

TIMES = RankTimes(18.5, 18.1, 9.3, 0.6)
SPEEDS = (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def profile(blocks: int) -> PipelineProfile:
    """A GPT on eight devices of the speeds above."""
    size = GptSize(
        blocks=blocks, hidden=1024, heads=16, vocabulary=32_000, sequence=1024
    )
    return PipelineProfile(
        layers=gpt_layers(size, {ANY_KIND: 50e12}),
        devices=tuple(
            DeviceProfile(name=f"device {index}", speed=speed)
            for index, speed in enumerate(SPEEDS)
        ),
        link=LinkProfile(latency_s=20e-6, bytes_per_s=12e9),
    )


def fleet(ranks: int) -> MeasuredCluster:
    """Ranks of three kinds, no two alike."""
    drawn = random.Random(3)
    speeds = [
        drawn.choice((1.0, 0.7, 0.4)) * drawn.uniform(0.9, 1.1) for _ in range(ranks)
    ]
    return MeasuredCluster(
        seconds_per_sample=[0.04 / 32 / speed for speed in speeds],
        batch_size=32,
        sync_s=0.5,
        sync_batch_size=32 * ranks,
    )


def calls() -> dict[str, tuple[Callable[[], Any], int, float]]:
    """What is timed by its name: the call, how often, and its bar in seconds."""
    made: dict[str, tuple[Callable[[], Any], int, float]] = {}
    for ranks, count, times, bar_s in ((8, 32, 5, 0.1), (64, 512, 1, 5.0)):
        for share in (None, 1.0, 0.75):
            memory = None if share is None else share * ranks
            held = "" if share is None else f", memory {share:g} of 1F1B's"
            made[f"schedule, {ranks} ranks, {count} microbatches{held}"] = (
                lambda r=ranks, c=count, m=memory: auto_placed(TIMES, r, c, m),
                times,
                bar_s,
            )
    layers = profile(46)
    made["plan, 48 layers on 8 devices, 32 microbatches"] = (
        lambda: plan_pipeline(layers, PlanConfig(num_microbatches=32)),
        3,
        2.0,
    )
    chooser, measured = Chooser(), fleet(10_000)
    made["choice of a policy, 10000 ranks"] = (
        lambda: chooser.observe(measured),
        3,
        0.5,
    )
    return made


def main() -> None:
    """Measures, prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = {}
    for name, (call, times, bar_s) in calls().items():
        took_s = []
        for _ in range(times):
            began_s = time.process_time()
            call()
            took_s.append(time.process_time() - began_s)
        figures[name] = {"processor_s": min(took_s), "bar_s": bar_s}
        print(f"{name:56} {min(took_s):7.3f} s (bar {bar_s:g} s)")
    write_record(args.json, figures)


if __name__ == "__main__":
    main()
