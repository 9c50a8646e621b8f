"""``elche simulate``: a run in virtual time, from a cluster file to a report."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elche.cli.files import check_outputs, read_toml, write_json
from elche.coordination.state import Coordinator
from elche.coordination.story import STORY_ENTRIES
from elche.errors import ConfigError
from elche.monitor.trace import to_chrome_trace
from elche.runtime.report.files import replace_file
from elche.sim.cluster import Cluster
from elche.sim.cluster_file import read_cluster
from elche.sim.engine import DeadlockError
from elche.sim.report import Report, report_of
from elche.sim.simulation import Simulation, Watch

SHOWN_RANKS = 16
SHOWN_RECOVERIES = 8
_STORY = re.compile(r"all|rank:[0-9]+|lease:([0-9]+/)?[0-9]+")


def run_simulate(
    path: Path,
    *,
    json_path: str | None,
    trace_path: Path | None,
    policy: str | None,
    stories: Sequence[str],
) -> int:
    """Simulates, prints and writes; returns the exit code.

    Args:
        path: path of the cluster file.
        json_path: path for the JSON report; "-" is standard output.
        trace_path: path for the timeline.
        policy: overrides the file's policy.
        stories: event logs to print: ``"all"``, ``"rank:1"``, ``"lease:12"`` (of the
            last epoch) or ``"lease:0/12"``.

    Raises:
        ConfigError: the file or a story is wrong, or a result cannot be written.
    """
    for wanted in stories:
        if not _STORY.fullmatch(wanted):
            raise ConfigError(
                "expected --story all, rank:1, lease:12 (a batch of the last epoch) or "
                f"lease:0/12 (of epoch 0), got {wanted!r}"
            )
    cluster = load_cluster(path, policy)
    for kind, _, number in (wanted.partition(":") for wanted in stories):
        if kind == "rank":
            cluster.check_rank(f"--story rank:{number}", int(number))
    check_outputs(json_path, trace_path)
    watch = Watch(timer=time.thread_time, details=trace_path is not None)
    sim = Simulation(cluster, watch)
    began_s = time.perf_counter()
    reason = ""
    gc.disable()  # would traverse simulated ranks, which no coordinator holds
    try:
        history = sim.run()
    except DeadlockError as error:
        history, reason = sim.history, str(error).splitlines()[0]
    finally:
        gc.enable()
    took_s = time.perf_counter() - began_s
    for rank, abort in sorted(history.aborts.items()):
        if not sim.is_rejected(rank):
            reason = reason or abort.reason.splitlines()[0]
    report = report_of(sim)
    figures = {**asdict(report), "simulated_in_s": took_s, "aborted": reason}
    write_json(json_path, figures)
    if trace_path is not None:
        names = {
            rank: f"rank {rank} {sums.device}".rstrip()
            for rank, sums in history.ranks.items()
        }
        facts = {"simulated": True, "policy": report.policy}
        trace = to_chrome_trace(history.spans, names, facts)
        replace_file(trace_path, json.dumps(trace))
    if json_path != "-":
        print(summary(report, took_s))
        for wanted in stories:
            print("\n".join(story_of(sim.core, wanted)))
    if reason:
        print(f"elche simulate: the run was aborted: {reason}", file=sys.stderr)
        return 1
    return 0


def load_cluster(path: Path, policy: str | None = None) -> Cluster:
    """Reads a cluster file.

    Args:
        path: path of the TOML file.
        policy: overrides the file's policy.

    Raises:
        ConfigError: the file cannot be read, or has an impossible value.
    """

    def made(raw: dict[str, Any]) -> Cluster:
        if policy is not None and isinstance(raw.get("run"), dict):
            raw["run"]["policy"] = policy
        return read_cluster(raw)

    return read_toml(path, made)


def story_of(core: Coordinator, wanted: str) -> list[str]:
    """Event log of a rank or a batch.

    Args:
        core: the coordinator, after the run.
        wanted: as in `run_simulate`.
    """
    kind, _, number = wanted.partition(":")
    if kind == "all":
        lines = core.story()
    elif kind == "rank":
        lines = core.story(int(number))
    else:
        epoch, _, batch = number.rpartition("/")
        lines = core.lease_story(int(batch), int(epoch) if epoch else None)
    if not lines:
        lines = [f"nothing among the last {STORY_ENTRIES} messages and decisions"]
    return [f"story of {wanted}:", *(f"  {line}" for line in lines)]


def summary(report: Report, took_s: float) -> str:
    """Human-readable text of the report."""
    waits = ", ".join(
        f"{cause} {100 * share:.2f} %"
        for cause, share in report.waits.items()
        if share >= 5e-5
    )
    late, most_late = report.lag_batches
    averages = (
        f"  averages adopted  {late:.1f} batches late (most {most_late}), "
        f"{report.lag_s[0]:.3f} s (most {report.lag_s[1]:.3f} s)"
    )
    recoveries = [
        "not seen" if one is None else f"{one:.2f} s"
        for one in report.recovery_s[:SHOWN_RECOVERIES]
    ]
    more = len(report.recovery_s) - len(recoveries)
    rest = f" and {more} more" if more else ""
    ranks = [
        f"    rank {one.rank} {one.device}: {one.samples} samples, busy "
        f"{one.busy_s:.2f} s, waiting {sum(one.waits.values()):.2f} s"
        f"{', died' if one.has_died else ''}"
        for one in report.ranks[:SHOWN_RANKS]
    ]
    lines = [
        f"policy {report.policy}, {report.world_size} ranks: {report.samples} samples "
        f"in {report.seconds:.2f} s (simulated in {took_s:.2f} s)",
        f"  efficiency        {report.efficiency:.4f} of the sum of the devices alone",
        f"  samples per s     {report.samples_per_s:.1f}",
        f"  goodput           {report.goodput:.3f} times the fastest device alone "
        f"(sample efficiency {report.sample_efficiency:.3f}, by the convergence table)",
        f"  synchronisations  {report.windows}, costing "
        f"{100 * report.sync_overhead:.2f} % of all ranks' time",
        f"  waits             {waits or 'none'}",
        *(f"  at {at.at_s:8.2f} s     auto: {at.reason}" for at in report.choices),
        *([averages] if most_late else []),
        *([f"  recovery          {', '.join(recoveries)}{rest}"] if recoveries else []),
        f"  coordinator       {report.messages_per_s:.0f} messages per s, "
        f"{report.coordinator_us_per_event or 0:.1f} µs per event (longest "
        f"{report.coordinator_most_us or 0:.0f} µs), at most "
        f"{report.most_instructions} instructions to an event",
        *ranks,
    ]
    if len(report.ranks) > len(ranks):
        lines.append(f"    and {len(report.ranks) - len(ranks)} ranks more")
    return "\n".join(lines)
