"""Goodput of ``auto`` beside that of every fixed policy, measured on emulated devices.

    python benchmarks/auto_measured.py --speeds 1,0.25 --seconds 40
    python benchmarks/auto_measured.py --speeds 1,0.25 --link-mbit 100 --codec int8

Runs `elche bench hetero` with all policies and multiplies what each delivered (hardware
efficiency, start-up and drain included) with what a sample is worth under it by the
convergence table, at this number of ranks and the windows of the run's second half.
``auto`` counts as the policy that it chose last. 1.0 is the fastest device alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hetero import measure

from elche.cadence.convergence import sample_efficiency

POLICIES = ("sync", "cadence", "async", "auto")


def goodput(found: dict[str, Any], policy: str, seed: int) -> dict[str, Any]:
    """What one measured run brought, relative to the fastest device alone."""
    per_seed = found["contenders"][f"elche-{policy}"]["per_seed"]
    speeds = found["speeds"]
    choices = per_seed["choices"][seed]
    effective = choices[-1][0] if policy == "auto" and choices else policy
    effective = "sync" if effective == "auto" else effective
    batches, late = 1.0, 0.0
    if effective != "sync":
        local = found["batch_size"] / len(speeds)
        batches = per_seed["window_samples"][seed] / local
    if effective == "async":
        late = per_seed["late_batches"][seed][speeds.index(max(speeds))]
    alone = effective not in ("sync", "cadence", "async")
    worth = 1.0
    if not alone:
        worth = sample_efficiency(effective, len(speeds), batches, late)
    hardware = per_seed["efficiency"][seed]
    return {
        "policy": effective,
        "hardware_efficiency": hardware,
        "window_batches": batches,
        "late_batches": late,
        "sample_efficiency": worth,
        "product": hardware * worth,
        "goodput": hardware * worth * sum(speeds) / max(speeds),
    }


def report(found: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> str:
    """The table, what ``auto`` reached of the best fixed policy, and its reasons."""
    lines = [
        f"control {found['gate']['control_efficiency']:.3f}",
        "policy    became    hardware  batches per window  late  worth of a sample  "
        "product  goodput",
    ]
    for policy, own in rows.items():
        lines += [
            f"{policy:9} {row['policy']:9} {row['hardware_efficiency']:8.3f} "
            f"{row['window_batches']:19.1f} {row['late_batches']:5.1f} "
            f"{row['sample_efficiency']:18.3f} {row['product']:8.3f} "
            f"{row['goodput']:8.3f}"
            for row in own
        ]
    means = {
        policy: sum(row["goodput"] for row in own) / len(own)
        for policy, own in rows.items()
    }
    auto = means.pop("auto", None)
    if auto is not None and means:
        ratio = auto / max(means.values())
        lines.append(f"auto over the best fixed policy: {ratio:.3f}")
        chosen = found["contenders"]["elche-auto"]["per_seed"]["choices"]
        lines += [
            f"seed {seed}: {policy}: {reason}"
            for seed, choices in enumerate(chosen)
            for policy, reason in choices
        ]
    return "\n".join(lines)


def main() -> int:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--speeds", default="1,0.25")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--solo-seconds", type=float, default=10.0)
    parser.add_argument("--ms-per-sample", type=float, default=1.25)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--link-mbit", type=float)
    parser.add_argument("--codec", default="fp32", help="with --link-mbit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    more = ["--seeds", str(args.seeds)]
    if args.link_mbit is not None:
        more += ["--link-mbit", str(args.link_mbit), "--codec", args.codec]
    found = measure(args, *more)
    seeds = range(len(found["seeds"]))
    rows = {
        policy: [goodput(found, policy, seed) for seed in seeds]
        for policy in args.policies.split(",")
    }
    print(report(found, rows))
    if args.json is not None:
        text = json.dumps({"goodput": rows, "bench": found}, indent=2) + "\n"
        args.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
