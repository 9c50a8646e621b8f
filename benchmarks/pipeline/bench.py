"""Steps of elche's pipeline and of torch's, on emulated devices."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.pipeline.plan import (
    BY_HAND,
    CONTENDERS,
    ELCHE,
    TORCH_CONTENDERS,
    BenchPlan,
    PipelineBenchConfig,
    make_bench_plan,
)
from elche.demo.compare import STDERR_TAIL_LINES
from elche.errors import RemoteRankError
from elche.monitor.progress import TaskProgress
from elche.monitor.run_view import aligned
from elche.runtime.process.launch import launch
from elche.runtime.process.launch_config import (
    LaunchConfig,
    LaunchResult,
    python_command,
)

RankResults = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contender's step.

    Attributes:
        makespans_s: of each repetition, from the first call of any stage to the end of
            the last.
        bubbles: of each repetition, share of it in which the busiest device idles.
        idles: of each repetition, share in which a device idles, mean of all devices;
            papers call that the bubble.
        overrun_share: most real compute beyond the declared time, of the busy time.
    """

    makespans_s: tuple[float, ...]
    bubbles: tuple[float, ...]
    idles: tuple[float, ...]
    overrun_share: float

    @property
    def makespan_s(self) -> float:
        """Median."""
        return median(self.makespans_s)

    @property
    def bubble(self) -> float:
        """Median."""
        return median(self.bubbles)

    @property
    def idle(self) -> float:
        """Median."""
        return median(self.idles)


def measured_of(results: Sequence[RankResults], name: str) -> Measured:
    """Puts the ranks' notes on a contender together.

    Args:
        results: of each rank, see `PipelineContenders.run`.
        name: the contender.
    """
    makespans, bubbles, idles, overrun = [], [], [], 0.0
    for steps in zip(*(one[name] for one in results), strict=True):
        begin_s = min(step["begin_s"] for step in steps)
        makespan_s = max(step["end_s"] for step in steps) - begin_s
        makespans.append(makespan_s)
        busy = [step["busy_s"] / makespan_s for step in steps]
        bubbles.append(1 - max(busy))
        idles.append(1 - fmean(busy))
        shares = (step["overrun_s"] / step["busy_s"] for step in steps)
        overrun = max(overrun, *shares)
    return Measured(
        makespans_s=tuple(makespans),
        bubbles=tuple(bubbles),
        idles=tuple(idles),
        overrun_share=overrun,
    )


def run_pipeline_bench(config: PipelineBenchConfig) -> None:
    """The command: measures, and prints the table.

    Raises:
        ConfigError: no plan fits; nothing was measured.
        RemoteRankError: a rank failed.
    """
    plan = make_bench_plan(config)
    results = run_ranks(config)
    found = {name: measured_of(results, name) for name in CONTENDERS}
    print("\n".join(table_lines(config, plan, found)))


def run_ranks(config: PipelineBenchConfig) -> list[RankResults]:
    """Runs all contenders, a process per device; returns what each rank noted.

    Raises:
        RemoteRankError: a rank failed; with the end of what it wrote.
        KeyboardInterrupt: the user ended it; all ranks have ended.
    """
    with (
        TaskProgress() as progress,
        tempfile.TemporaryDirectory(prefix="elche-") as folder,
    ):
        out, task = Path(folder), "steps of all contenders"
        (out / "spec.json").write_text(config.to_json())
        progress.start(task, float(config.repetitions))

        def on_line(rank: int, line: str) -> None:
            try:
                progress.update(task, float(json.loads(line)["done"]))
            except (ValueError, TypeError, KeyError):
                sys.stderr.write(line + "\n")

        result = launch(
            LaunchConfig(
                command=python_command(
                    "-m", "benchmarks.pipeline.contender", str(out / "spec.json")
                ),
                devices=("cpu",) * config.num_ranks,
                environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()},
                on_line=on_line,
            )
        )
        _check(result, out)
        progress.finish(task, f"{config.repetitions} each")
        return [
            json.loads((out / f"result-{rank}.json").read_text())
            for rank in range(config.num_ranks)
        ]


def import_path() -> str:
    """What a rank needs to find this package, beside what this process was given."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def table_lines(
    config: PipelineBenchConfig, plan: BenchPlan, found: dict[str, Measured]
) -> list[str]:
    """The table and what it says, as lines of text."""
    speeds = ", ".join(f"{speed:g}" for speed in config.speeds)
    steps = found.values()
    over_fluid = [f"{one.makespan_s / plan.ideal_s:.3f}" for one in steps]
    over_whole = [f"{one.makespan_s / plan.partition_ideal_s:.3f}" for one in steps]
    columns = [
        ("contender", "<", [*found]),
        ("makespan", ">", [f"{one.makespan_s:.3f} s" for one in steps]),
        ("mean idle", ">", [f"{one.idle:.3f}" for one in steps]),
        ("busiest idle", ">", [f"{one.bubble:.3f}" for one in steps]),
        ("/fluid ideal", ">", over_fluid),
        ("/whole-layer ideal", ">", over_whole),
    ]
    ours = found[ELCHE]
    overrun = max(one.overrun_share for one in steps)
    times = {name: one.makespan_s / ours.makespan_s for name, one in found.items()}
    equal = min(TORCH_CONTENDERS, key=times.__getitem__)
    by_hand = min(BY_HAND, key=times.__getitem__)
    stages = ", ".join(
        f"{size} on {rank}"
        for size, rank in zip(plan.sizes, plan.schedule.placement, strict=True)
    )
    return [
        f"{config.layers} layers, {config.microbatches} microbatches, emulated devices "
        f"of speeds {speeds} ({config.ms_per_layer:g} ms each for F, I and W of a "
        f"layer at speed 1), medians of {config.repetitions}",
        "",
        *aligned(columns),
        "",
        f"fluid ideal (layers divide as speeds do): {plan.ideal_s:.3f} s; whole-layer "
        f"ideal: {plan.partition_ideal_s:.3f} s; mean idle is what papers call bubble",
        f"elche: {plan.schedule.name}; layers of the stages, and their devices: "
        f"{stages}",
        "elche: at most "
        + ", ".join(f"{peak:g}" for peak in plan.peak_layers)
        + f" layers' activations held (torch's equal split: about {config.layers})",
        f"elche: predicted from declared times {plan.predicted_s:.3f} s, measured "
        f"{ours.makespan_s:.3f} s",
        f"most real compute beyond the declared time: {overrun:.1%} of the busy time",
        f"elche: {times[equal]:.2f} times as fast as {equal} on an equal split, "
        f"{times[by_hand]:.2f} times as fast as {by_hand}",
    ]


def _check(result: LaunchResult, out: Path) -> None:
    if not result.exit_code:
        return
    interrupted = 128 + signal.SIGINT
    if result.reason == "interrupted" or interrupted in result.exit_codes:
        raise KeyboardInterrupt
    failed = [rank for rank, code in enumerate(result.exit_codes) if code]
    own = [rank for rank in failed if rank not in result.terminated] or failed
    lines = [f"the pipeline benchmark failed on ranks {own}: {result.reason}"]
    for rank in own:
        path = out / f"stderr-{rank}.txt"
        said = path.read_text(errors="replace") if path.exists() else ""
        lines += [f"--- last output of rank {rank} ---"]
        lines += said.splitlines()[-STDERR_TAIL_LINES:] or ["(nothing)"]
    raise RemoteRankError("\n".join(lines), own[0])
