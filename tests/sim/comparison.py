"""Policies compared on simulated clusters, by goodput; clusters drawn at random."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from elche.errors import ElcheError
from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from elche.sim.report import Report, report_of
from elche.sim.simulation import Simulation

FIXED_POLICIES = ("sync", "cadence", "async")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Reports of the fixed policies, of the fastest device alone, and of ``auto``."""

    fixed: tuple[Report, ...]
    alone: Report
    auto: Report

    @property
    def best(self) -> Report:
        """The fixed policy of the highest goodput, one device alone among them."""
        return max(*self.fixed, self.alone, key=lambda report: report.goodput)

    @property
    def ratio(self) -> float:
        """Goodput of ``auto`` over that of the best fixed policy."""
        return self.auto.goodput / self.best.goodput


def owed_s(cluster: Cluster) -> float:
    """Seconds that a run of several ranks costs whatever it chooses, over one device.

    All take part in the first step, on equal parts, or nothing is known of them; it is
    reduced; and all ranks hold the model whenever an epoch ends.
    """
    run = cluster.run
    part = math.ceil(run.batch_size / cluster.world_size)
    first_s = max(device.compute_s(part) for device in cluster.devices)
    first_s -= min(device.compute_s(run.batch_size) for device in cluster.devices)
    reduction_s = cluster.link.reduce_s(run.model_bytes, cluster.world_size)
    return max(0.0, first_s) + (1 + run.epochs) * reduction_s


def compare(cluster: Cluster) -> Comparison:
    """Simulates whole runs of a cluster under every fixed policy, and under ``auto``.

    Raises:
        ElcheError: a run was aborted.
    """
    *fixed, auto = (
        report_under(cluster, policy) for policy in (*FIXED_POLICIES, "auto")
    )
    alone = report_under(fastest_of(cluster), "sync")
    return Comparison(fixed=tuple(fixed), alone=alone, auto=auto)


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


def report_under(cluster: Cluster, policy: str) -> Report:
    """Simulates a whole run of a cluster under a policy.

    Raises:
        ElcheError: the run was aborted.
    """
    run = replace(cluster.run, policy=policy)
    sim = Simulation(replace(cluster, run=run))
    history = sim.run()
    for abort in history.aborts.values():
        raise ElcheError(f"policy {policy}: {abort.reason}")
    return report_of(sim)
