"""Plans of reductions, as the coordinator would send them."""

from __future__ import annotations

from typing import Any

from elche.coordination.protocol.instructions import Reduce


def plan(rank: int = 0, **changes: Any) -> Reduce:
    """A plain mean over two ranks, unless told otherwise."""
    settings: dict[str, Any] = {
        "epoch": 0,
        "window": 0,
        "attempt": 0,
        "weight": 0.5,
        "active_ranks": 2,
        "buffers": (),
        "outer": "average",
        "outer_lr": 1.0,
        "outer_momentum": 0.5,
    }
    return Reduce(rank=rank, **{**settings, **changes})
