"""Table of models of transformers by schedule and number of ranks.

    python -m tests.integrations.model_table [Llama ...]

Each row has the worst relative error of losses and gradients against one process, or
why the model was refused.
"""

from __future__ import annotations

import sys
import time

import transformers

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.integrations.cases.hf_models import FAMILIES, alone, piped, worst_error

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "auto")


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}")
    cells = [f"{one}, {ranks}" for ranks in (2, 3) for one in SCHEDULES]
    print("| model | layers | " + " | ".join(cells) + " |", flush=True)
    with RankPool(2) as two, RankPool(3) as three:
        for name in names:
            begun_s = time.monotonic()
            expected = alone(name)
            row: list[str] = []
            for pool in (two, three):
                for schedule in SCHEDULES:
                    found = pool.run(piped, name, schedule, case_setup=serve_in_thread)
                    refused = found[0].refused
                    error = 0.0 if refused else worst_error(found, expected)
                    is_wrong = error > FAMILIES[name].tolerance
                    row.append(refused or f"{'WRONG ' * is_wrong}{error:.0e}")
            cells = row if len(set(row)) > 1 else [row[0]]
            print(f"| {name} | {found[0].layers} | " + " | ".join(cells), end=" | ")
            print(f"{time.monotonic() - begun_s:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
