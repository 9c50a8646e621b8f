"""Goodput of ``auto`` beside that of every fixed policy, on simulated clusters.

    python benchmarks/auto_goodput.py examples/clusters/*.toml
    python benchmarks/auto_goodput.py --random 40 --json build/auto.json

Goodput is what a run learns per second over what the fastest device would alone: hours
are simulated with the real coordinator, start-up included; what a sample is worth comes
from the convergence table (`elche.cadence.convergence`). "alone" is the fastest device
in a run of its own, which counts as a fixed policy. What is owed whatever is chosen
(the first step of all ranks, the model to all at each epoch's end):
`comparison.owed_s`; what is possible with that, `comparison.possible`.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from comparison import FIXED_POLICIES, Comparison, compare, random_cluster, table

from elche.cli.sim_command import load_cluster

PARTS = (0.002, 0.01)
"""Clusters are told apart by what a reduction takes of the run, at these parts."""


def summary(found: list[Comparison]) -> str:
    """How near to the best policies, and to one device, ``auto`` comes."""
    edges = (0.0, *PARTS, float("inf"))
    groups = [("all", found)]
    for least, most in pairwise(edges):
        chosen = [one for one in found if least <= one.reduction_part < most]
        groups.append((f"a reduction takes {least:.1%} to {most:.1%} of it", chosen))
    return "\n".join(_line(name, chosen) for name, chosen in groups if chosen)


def _line(name: str, found: list[Comparison]) -> str:
    ratios = [one.ratio for one in found]
    alone = [one.over_alone for one in found]
    bound = [one.of_bound for one in found]
    below, missed = (sum(r < 0.99 for r in each) for each in (alone, bound))
    reached = [one.auto.goodput / one.possible for one in found]
    most = [one.possible / one.best.goodput for one in found]
    return (
        f"{name}: {len(found)} clusters; of the best fixed policy: median "
        f"{median(ratios):.3f}, worst {min(ratios):.3f}, below 0.95 in "
        f"{sum(ratio < 0.95 for ratio in ratios)}; of one device: worst "
        f"{min(alone):.3f}, below 0.99 in {below}; of one device that pays what is "
        f"owed: worst {min(bound):.3f}, below 0.99 in {missed}; possible of the best "
        f"fixed policy: median {median(most):.3f}, worst {min(most):.3f}, below 0.95 "
        f"in {sum(r < 0.95 for r in most)}; of what is possible: median "
        f"{median(reached):.3f}, worst {min(reached):.3f}, below 0.95 in "
        f"{sum(r < 0.95 for r in reached)}"
    )


def record(one: Comparison) -> dict[str, Any]:
    """A comparison as JSON has it."""
    reports = (*one.fixed, one.alone, one.auto)
    names = (*FIXED_POLICIES, "alone", "auto")
    return {
        "name": one.name,
        "goodput": {n: r.goodput for n, r in zip(names, reports, strict=True)},
        "of_best": one.ratio,
        "of_alone": one.over_alone,
        "of_bound": one.of_bound,
        "of_possible": one.auto.goodput / one.possible,
        "reduction_part": one.reduction_part,
        "seconds": one.auto.seconds,
        "choices": [[c.at_s, c.policy, c.reason] for c in one.auto.choices],
    }


def main() -> int:
    """Compares the given clusters, or random ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clusters", nargs="*", type=Path)
    parser.add_argument("--random", type=int, default=0, help="so many, drawn")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    named = [(path.stem, load_cluster(path)) for path in args.clusters]
    drawn = range(args.first, args.first + args.random)
    named += [(f"random {seed}", random_cluster(seed)) for seed in drawn]
    if not named:
        parser.error("expected files of clusters, or --random N")
    found = [compare(cluster, name) for name, cluster in named]
    print(table(found))
    for one in found:
        for choice in one.auto.choices:
            print(f"{one.name}, at {choice.at_s:.2f} s: {choice.reason}")
    print(summary(found))
    if args.json is not None:
        text = json.dumps([record(one) for one in found], indent=2) + "\n"
        args.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
