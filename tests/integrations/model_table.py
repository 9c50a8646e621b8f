"""Table of models of transformers by schedule and number of ranks.

    python -m tests.integrations.model_table [--cells zb-v:2 ...] [--models Llama ...]

Each row has the worst relative error of losses and gradients against one process, or
why the model was refused.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import transformers

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.integrations.cases.hf_models import FAMILIES, alone, piped, worst_error

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "auto")
CELLS = [f"{schedule}:{ranks}" for ranks in (2, 3) for schedule in SCHEDULES]


def cell(pool: RankPool, name: str, schedule: str) -> tuple[int, str]:
    """Number of layers of a model, and its cell of the table."""
    expected = alone(name)
    found = pool.run(piped, name, schedule, case_setup=serve_in_thread)
    error = 0.0 if found[0].refused else worst_error(found, expected)
    is_exact = error <= FAMILIES[name].tolerance
    return found[0].layers, found[
        0
    ].refused or f"{error:.0e}{' WRONG' * (not is_exact)}"


def main() -> None:
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="+", default=CELLS, choices=CELLS)
    parser.add_argument("--models", nargs="+", default=FAMILIES, choices=FAMILIES)
    asked = parser.parse_args()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"| model | layers | {' | '.join(asked.cells)} | s |", flush=True)
    with RankPool(2) as two, RankPool(3) as three:
        pools = {"2": two, "3": three}
        for name in asked.models:
            begun_s = time.monotonic()
            row: list[str] = []
            for one in asked.cells:
                schedule, _, ranks = one.partition(":")
                layers, found = cell(pools[ranks], name, schedule)
                row.append(found)
            spent_s = time.monotonic() - begun_s
            print(f"| {name} | {layers} | {' | '.join(row)} | {spent_s:.0f} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
