"""Trains features one after the other in this process; each leaves a file.

``python rank.py FOLDER FEATURE...``, alone or under ``elche run``.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
from pathlib import Path

import torch

from benchmarks.features.everything import FEATURES
from benchmarks.features.feature import PlainTorch

HANGS_AFTER_S = 300.0
MARK = "feature: "


def train(name: str, folder: Path) -> None:
    """Trains one feature, with elche if a launcher started this process."""
    rank = os.environ.get("RANK")
    elche: object = PlainTorch
    if rank is not None:
        import elche
    if rank == "0":
        print(f"{MARK}{name}", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    random.seed(0)
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    try:
        trained = FEATURES[name].train(elche)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        (folder / f"{name}.{rank}.error").write_text(text, encoding="utf-8")
        raise
    torch.save(trained.result(), folder / f"{name}.{rank or 0}.pt")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[2:]:
        train(each, Path(sys.argv[1]))
