"""Goodput of ``auto`` beside that of every fixed policy, on simulated clusters.

    python benchmarks/auto_goodput.py examples/clusters/*.toml

Goodput is what a run learns per second over what the fastest device would alone: hours
are simulated with the real coordinator, start-up included; what a sample is worth comes
from the convergence table (`elche.cadence.convergence`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from comparison import compare, table

from elche.cli.sim_command import load_cluster


def main(paths: list[str]) -> int:
    """Compares the clusters that these files describe."""
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    found = []
    for path in map(Path, paths):
        found.append(compare(load_cluster(path), path.stem))
    print(table(found))
    for one in found:
        for choice in one.auto.choices:
            print(f"{one.name}, at {choice.at_s:.2f} s: {choice.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
