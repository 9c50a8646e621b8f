"""Policies compared on one simulated cluster, by goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elche.errors import ElcheError
from elche.sim.cluster import Cluster
from elche.sim.report import Report, report_of
from elche.sim.simulation import Simulation

FIXED_POLICIES = ("sync", "cadence", "async")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What each fixed policy brings on a cluster, and what ``auto`` does.

    Attributes:
        name: of the cluster.
        fixed: a report for each fixed policy.
        auto: of ``auto``.
    """

    name: str
    fixed: tuple[Report, ...]
    auto: Report

    @property
    def best(self) -> Report:
        """The fixed policy of the highest goodput."""
        return max(self.fixed, key=lambda report: report.goodput)

    @property
    def ratio(self) -> float:
        """Goodput of ``auto`` over that of the best fixed policy."""
        return self.auto.goodput / self.best.goodput


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
    return Comparison(name=name, fixed=tuple(fixed), auto=auto)


def table(comparisons: Sequence[Comparison]) -> str:
    """Goodput of every policy, a line for each cluster."""
    wide = max((len(one.name) for one in comparisons), default=0)
    head = "".join(f"{policy:>9}" for policy in FIXED_POLICIES)
    lines = [f"{'':{wide}}{head}     auto  of best  began under sync, then"]
    for one in comparisons:
        figures = "".join(f"{report.goodput:9.3f}" for report in one.fixed)
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
