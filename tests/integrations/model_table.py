"""Table of models of transformers by schedule and number of ranks.

    python -m tests.integrations.model_table [--cells zb-v:2 ...] [--models Llama ...]

Each row has the worst relative error of losses and gradients against one process, or
why the model was refused. `load` builds the model on the meta device and loads the
weights from files, `generate` compares the chosen tokens; both as zb-v on two ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from tests.harness.rank_pool import RankPool
from tests.integrations.cases.hf_models import (
    FAMILIES,
    Ran,
    alone,
    piped,
    worst_error,
)

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "auto")
LOAD, GENERATE = "load:2", "generate:2"
CELLS = [f"{schedule}:{ranks}" for ranks in (2, 3) for schedule in SCHEDULES]
CELLS += [LOAD, GENERATE]


def cell(pool: RankPool, name: str, column: str) -> tuple[int, str]:
    """Number of layers of a model, and its cell of the table."""
    schedule = "zb-v" if column in (LOAD, GENERATE) else column.partition(":")[0]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if column == LOAD else None
        expected = alone(name, folder)
        generates = column == GENERATE and expected.tokens is not None
        found = pool.serve(piped, name, schedule, folder, generates)
    if found[0].refused:
        return found[0].layers, found[0].refused
    if column == GENERATE:
        return found[0].layers, _tokens(found, expected)
    error = worst_error(found, expected)
    is_exact = error <= FAMILIES[name].tolerance
    return found[0].layers, f"{error:.0e}{' WRONG' * (not is_exact)}"


def _tokens(found: list[Ran], expected: Ran) -> str:
    if expected.tokens is None:
        return "-"
    equal = [one.tokens.tolist() == expected.tokens.tolist() for one in found]
    return "equal" if all(equal) else "WRONG"


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
                layers, found = cell(pools[one[-1]], name, one)
                row.append(found)
            spent_s = time.monotonic() - begun_s
            print(f"| {name} | {layers} | {' | '.join(row)} | {spent_s:.0f} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
