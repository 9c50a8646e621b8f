"""Policies compared on simulated clusters, by goodput; clusters drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elche.errors import ElcheError
from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from elche.sim.report import Report, report_of
from elche.sim.simulation import Simulation

FIXED_POLICIES = ("sync", "cadence", "async")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What each fixed policy brings on a cluster, and what ``auto`` does.

    Attributes:
        name: of the cluster.
        fixed: a report for each fixed policy.
        alone: of the fastest device in a run of its own.
        auto: of ``auto``.
        owed_s: see :func:`owed_s`.
        possible: see :func:`possible`.
        reduction_s: of one reduction.
    """

    name: str
    fixed: tuple[Report, ...]
    alone: Report
    auto: Report
    owed_s: float
    possible: float
    reduction_s: float

    @property
    def best(self) -> Report:
        """The fixed policy of the highest goodput, one device alone among them."""
        return max(*self.fixed, self.alone, key=lambda report: report.goodput)

    @property
    def ratio(self) -> float:
        """Goodput of ``auto`` over that of the best fixed policy."""
        return self.auto.goodput / self.best.goodput

    @property
    def over_alone(self) -> float:
        """Goodput of ``auto`` over that of the fastest device in a run of its own."""
        return self.auto.goodput / self.alone.goodput

    @property
    def bound(self) -> float:
        """What ``auto`` can reach of that, where the fastest device is the choice."""
        return self.alone.seconds / (self.alone.seconds + self.owed_s)

    @property
    def of_bound(self) -> float:
        """Goodput of ``auto`` over that of one device that pays what is owed."""
        return self.over_alone / self.bound

    @property
    def reduction_part(self) -> float:
        """What one reduction takes of the time of the fastest device's own run."""
        return self.reduction_s / self.alone.seconds


def owed_s(cluster: Cluster) -> float:
    """Seconds that a run of several ranks costs whatever it chooses, over one device.

    All take part in the first step, on equal parts, or nothing is known of them; it is
    reduced; and all ranks hold the model whenever an epoch ends.
    """
    run = cluster.run
    first_s = _first_s(cluster)
    first_s -= min(device.compute_s(run.batch_size) for device in cluster.devices)
    return max(0.0, first_s) + (1 + run.epochs) * _reduction_s(cluster)


def possible(cluster: Cluster, fixed: Sequence[Report], alone: Report) -> float:
    """Goodput of the best policy, one device among them, where it must be found.

    One device pays what is owed. A policy of several ranks hands its model over anyway;
    the first step of all, on equal parts, takes the place of a batch of its own.
    """
    batches = cluster.run.epochs * math.ceil(
        cluster.run.samples / cluster.run.batch_size
    )
    step_s = _first_s(cluster) + _reduction_s(cluster)
    behind = [(each, step_s - each.seconds / batches) for each in fixed]
    behind.append((alone, owed_s(cluster)))
    return max(
        report.goodput * report.seconds / (report.seconds + max(0.0, more_s))
        for report, more_s in behind
    )


def _first_s(cluster: Cluster) -> float:
    """Computing of a step on equal parts, which tells first what ranks are like."""
    part = math.ceil(cluster.run.batch_size / cluster.world_size)
    return max(device.compute_s(part) for device in cluster.devices)


def _reduction_s(cluster: Cluster) -> float:
    return cluster.link.reduce_s(cluster.run.model_bytes, cluster.world_size)


def compare(cluster: Cluster, name: str = "") -> Comparison:
    """Simulates a cluster under every fixed policy, and under ``auto``.

    Each run is whole: joining, probing, measuring, switching and the drain at the end
    of every epoch count.

    Args:
        cluster: what is simulated; its policy does not matter.
        name: of it.

    Raises:
        ElcheError: a run was aborted.
    """
    *fixed, auto = (_report(cluster, policy) for policy in (*FIXED_POLICIES, "auto"))
    alone = _report(fastest_of(cluster), "sync")
    return Comparison(
        name=name,
        fixed=tuple(fixed),
        alone=alone,
        auto=auto,
        owed_s=owed_s(cluster),
        possible=possible(cluster, fixed, alone),
        reduction_s=_reduction_s(cluster),
    )


def over_alone(cluster: Cluster) -> float:
    """Goodput of ``auto`` over that of the fastest device in a run of its own."""
    alone = _report(fastest_of(cluster), "sync").goodput
    return _report(cluster, "auto").goodput / alone


def fastest_of(cluster: Cluster) -> Cluster:
    """The fastest device of a cluster, alone."""
    samples = cluster.run.batch_size
    fastest = min(cluster.devices, key=lambda device: device.mean_batch_s(samples))
    return replace(cluster, devices=(replace(fastest, count=1),))


def random_cluster(seed: int, most_batches: int = 6000) -> Cluster:
    """Draws a cluster and a run of 200 or more batches.

    Two to eight ranks in any order of speed, down to a tenth of the fastest; up to half
    of a batch's time is fixed; links of 10 to 10 000 Mbit/s.
    """
    draw = random.Random(f"cluster {seed}")
    batch_size = draw.choice((32, 64, 128, 256))
    fast_s = _log_uniform(draw, 0.01, 0.5)
    fixed, jitter = draw.uniform(0.0, 0.5), draw.uniform(0.0, 0.2)
    first_batches = draw.choice((0.0, draw.uniform(1.0, 10.0)))  # compilation
    others = range(draw.randint(1, 7))
    speeds = [1.0, *(_log_uniform(draw, 0.1, 1.0) for _ in others)]
    draw.shuffle(speeds)
    batches = round(_log_uniform(draw, 200, most_batches))
    epochs = draw.randint(1, 3)
    return Cluster(
        run=SimulatedRun(
            policy="auto",
            samples=math.ceil(batches / epochs) * batch_size,
            epochs=epochs,
            batch_size=batch_size,
            model_bytes=_log_uniform(draw, 4e5, 4e7),
            seed=seed,
        ),
        devices=tuple(
            Device(
                seconds_per_sample=(1.0 - fixed) * fast_s / speed / batch_size,
                seconds_per_batch=fixed * fast_s / speed,
                jitter=jitter,
                first_batch_s=first_batches * fast_s,
            )
            for speed in speeds
        ),
        link=Link(
            latency_s=_log_uniform(draw, 1e-4, 5e-3),
            bytes_per_s=_log_uniform(draw, 10e6, 10e9) / 8.0,
        ),
    )


def _log_uniform(draw: random.Random, least: float, most: float) -> float:
    return math.exp(draw.uniform(math.log(least), math.log(most)))


def table(comparisons: Sequence[Comparison]) -> str:
    """Goodput of every policy, a line for each cluster."""
    wide = max((len(one.name) for one in comparisons), default=0)
    head = "".join(f"{policy:>9}" for policy in FIXED_POLICIES)
    lines = [f"{'':{wide}}{head}    alone     auto  of best  began under sync, then"]
    for one in comparisons:
        reports = (*one.fixed, one.alone)
        figures = "".join(f"{report.goodput:9.3f}" for report in reports)
        chosen = ", ".join(
            f"{phase.policy} on {phase.ranks} from {phase.began_s:.1f} s"
            for phase in one.auto.phases[1:]
        )
        lines.append(
            f"{one.name:{wide}}{figures}{one.auto.goodput:9.3f}{one.ratio:9.3f}  "
            f"{chosen or 'stayed'}"
        )
    return "\n".join(lines)


def _report(cluster: Cluster, policy: str) -> Report:
    run = replace(cluster.run, policy=policy)
    sim = Simulation(replace(cluster, run=run))
    history = sim.run()
    for abort in history.aborts.values():
        raise ElcheError(f"policy {policy}: {abort.reason}")
    return report_of(sim)
