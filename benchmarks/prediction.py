"""What the simulator predicts beside what emulated devices deliver, policy by policy.

    python benchmarks/prediction.py --speeds 1,0.25 --seconds 60 --json prediction.json
    python benchmarks/prediction.py --speeds 1,0.67,0.4,0.25 --ms-per-sample 5

Runs `elche bench hetero`, then simulates the same run with what was measured of its
parts: the speed of every device alone, and what one synchronisation cost. Under
``async`` that is copies, half at a window's end and half when its result is adopted;
under ``cadence`` it is the link; under ``sync`` the link of the ``cadence`` run, hidden
under backward as far as it goes. Everything else (windows, waits at their ends, leases,
start-up, drain) is predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hetero import measure

from elche.sim.cluster import Cluster, Device, Link, SimulatedRun
from elche.sim.report import report_of
from elche.sim.simulation import Simulation

CONTROL_LATENCY_S = 0.0005
ALL_REDUCE_PARTS = 2.0


def sync_cost_s(contender: dict[str, Any]) -> float:
    """Mean seconds of one synchronisation of a measured contender."""
    per_seed = contender["per_seed"]
    windows = sum(per_seed["windows"])
    return float(sum(per_seed["sync_s"]) / windows) if windows else 0.0


def predicted(policy: str, found: dict[str, Any], link_s: float) -> float:
    """Simulated efficiency of a policy.

    Args:
        policy: which.
        found: the measured run.
        link_s: seconds of one blocking reduction, where the policy does not tell.
    """
    contenders, ranks = found["contenders"], len(found["speeds"])
    alone = [contenders[f"solo-{rank}"]["samples_per_s"] for rank in range(ranks)]
    mine = contenders[f"elche-{policy}"]
    cost_s = sync_cost_s(mine) if policy != "sync" else link_s
    model_bytes = 4.0 * found["parameters"]
    copy_bytes_per_s = 100e9
    if policy == "async":
        copy_bytes_per_s = model_bytes / max(cost_s / 2.0, 1e-6)
        cost_s = 1e-4  # in memory that the ranks share the sum is there at once
    sent = ALL_REDUCE_PARTS * (ranks - 1) / ranks * model_bytes
    cluster = Cluster(
        run=SimulatedRun(
            policy=policy,
            samples=found["samples"],
            batch_size=found["batch_size"],
            model_bytes=model_bytes,
        ),
        devices=tuple(
            Device(seconds_per_sample=1.0 / rate, copy_bytes_per_s=copy_bytes_per_s)
            for rate in alone
        ),
        link=Link(
            latency_s=CONTROL_LATENCY_S,
            bytes_per_s=sent / max(cost_s, 1e-6),
            efficiency=1.0,  # measured with payload
        ),
    )
    simulation = Simulation(cluster)
    simulation.run()
    return report_of(simulation).efficiency


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per policy."""
    found = measure(args)
    policies = args.policies.split(",")
    link_s = 0.0
    if "cadence" in policies:
        link_s = sync_cost_s(found["contenders"]["elche-cadence"])
    rows = []
    for policy in policies:
        mine = found["contenders"][f"elche-{policy}"]
        guess = predicted(policy, found, link_s)
        rows.append(
            {
                "ranks": len(found["speeds"]),
                "speeds": found["speeds"],
                "policy": policy,
                "measured": mine["efficiency"],
                "predicted": guess,
                "difference": guess - mine["efficiency"],
                "windows": mine["windows"],
                "sync_ms": sync_cost_s(mine) * 1e3,
                "control": found["contenders"]["indep"]["efficiency"],
            }
        )
    return rows


def main() -> int:
    """Prints the comparison; writes it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speeds", default="1,0.25")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--solo-seconds", type=float, default=12.0)
    parser.add_argument("--ms-per-sample", type=float, default=1.25)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--policies", default="cadence,async,sync")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = compare(args)
    print("policy    measured  predicted  difference  windows  sync ms  control")
    for row in rows:
        print(
            f"{row['policy']:<9} {row['measured']:8.3f}  {row['predicted']:9.3f}  "
            f"{row['difference']:+10.3f}  {row['windows']:7.0f}  "
            f"{row['sync_ms']:7.1f}  {row['control']:7.3f}"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
