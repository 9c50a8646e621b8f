"""Sample cost of windows, by world size, window, lag, run length and optimizer.

The figures are from `docs/convergence.md`: a character model of 64 k parameters on
virtual ranks, each with a fraction of one device's batch as its local batch. Deltas
have equal weights and a Nesterov outer step; one to three seeds. They rank policies and
promise nothing about a given model. At equal global batch, windows cost about the same
fraction of runs of 500, 2000 and 8000 batches. Steps of `sync` are those of one device
and cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

UPDATES = {"sync": "gradients", "cadence": "parameters", "async": "parameters"}
"""Policies in order of preference, with the tensors that each averages."""
REFERENCE_BATCHES = 2000.0
"""Batches of one device in the runs of the table."""
LEAST_BATCHES = 500.0
"""Batches of the shortest measured run; shorter runs are assumed to lose as much."""
FREE_LAG = 1.0 / 3.0
"""Fraction of a window up to which a late average has no extra cost."""

# Rows: 2, 4 and 8 ranks; columns: local batches per rank and window. AdamW, with local
# optimizer state, blocking. A lag within a third of the window cost nothing. Measured
# in runs of 2000 batches. At four and eight ranks the first column lies between those
# (0.95 and 0.87) and runs of 8000 (0.92 and 0.74, not tuned). The last slope continues
# beyond the last column; in an earlier study it fell faster there.
_WINDOW_KNOTS = (2.5, 12.5, 50.0)
_RANK_KNOTS = (2, 4, 8)
_EFFICIENCY = ((0.98, 0.96, 0.88), (0.94, 0.91, 0.76), (0.82, 0.76, 0.46))
# Remaining factor if an average comes a whole window late. Measured: 0.97 and 0.85 in
# the first two columns of four ranks. The second (two seeds) lies between that and an
# earlier study's 0.74; other rows and longer windows follow the earlier study (0.95;
# 0.88 and 0.63) in the same way. Measured since in the second column
# of eight ranks: 0.81, but 0.69 in runs of 1000 batches; the table keeps the lower.
_WHOLE_LAG_EFFICIENCY = ((0.97, 0.95, 0.95), (0.97, 0.80, 0.80), (0.92, 0.70, 0.70))
_OPTIMIZER_PRICES = {"adam": 1.0, "sgd": 0.3, "muon": 1.0}
"""Sample cost of windows by kind of optimizer, relative to AdamW's.

Muon: 0.93 and 0.83 at four and eight ranks (one seed). SGD lost nothing at either, but
its runs scatter by up to a third of AdamW's cost.
"""

_LARGER_BATCH_KNOTS = (2, 4, 8)
_LARGER_BATCH_PRICES = (0.0, 250.0, 1060.0)
"""Cost, in batches of one device, of a global batch larger by these factors: equal in
runs of 1000, 2000 and 8000 (earlier study; the last slope continues above eight)."""
_LARGER_BATCH_POWER = 0.6
"""Exponent of that factor in the cost of windows: within 0.1 of the earlier study's
runs of 1000 and 2000 batches; too high in longer runs."""

_LOG2_LARGER_BATCH = [math.log2(knot) for knot in _LARGER_BATCH_KNOTS]
_LOG2_RANKS = [math.log2(knot) for knot in _RANK_KNOTS]
_LOG2_WINDOWS = [math.log2(knot) for knot in _WINDOW_KNOTS]
_LOGARITHMS = {
    name: [[math.log(value) for value in row] for row in table]
    for name, table in (("met", _EFFICIENCY), ("late", _WHOLE_LAG_EFFICIENCY))
}


def optimizer_kind(names: Iterable[str]) -> str:
    """Returns the kind of a model's optimizers, by the names of their classes.

    Args:
        names: class names. Muon beside another optimizer counts as Muon. SGD alone
            counts as SGD, and anything else as Adam, which costs most.
    """
    known = set(names)
    if any("muon" in name.lower() for name in known):
        return "muon"
    return "sgd" if known == {"SGD"} else "adam"


def sample_efficiency(
    policy: str,
    world_size: int,
    window_batches: float,
    lag_batches: float = 0.0,
    *,
    run_batches: float = REFERENCE_BATCHES,
    global_batch: float = 1.0,
    optimizer: str = "adam",
) -> float:
    """Returns the samples that one device needs to a loss, over the policy's samples.

    The table is interpolated linearly in the logarithms of world size, window and
    efficiency; the last slope continues beyond it. Windows shorter than the first knot
    count as that knot. A lag of ``async`` has no extra cost up to a third of the
    window, and the highest cost at the whole window.

    The table holds for runs of ten windows or more. In a run of one window, each rank
    trains its part of the samples alone: less than the fastest device alone would
    learn. In a run of n windows, efficiency is at most the n-th root of a part, which
    is above every cell of the table.

    Args:
        policy: ``"sync"``, ``"cadence"`` or ``"async"``.
        world_size: number of ranks, at least 1; one rank loses nothing.
        window_batches: local batches of all ranks between two synchronisations.
        lag_batches: local batches of the fastest rank from a window's end to the
            arrival of its average; used for ``async`` only.
        run_batches: batches of one device in the whole run.
        global_batch: sum of all local batches in batches of one device; above 1 if
            local batches are larger than a rank's fraction of that batch.
        optimizer: kind of optimizer, see :func:`optimizer_kind`.

    Returns:
        The efficiency: above 0, at most 1.
    """
    if policy == "sync" or world_size == 1:
        return 1.0
    found = table_efficiency(policy, world_size, window_batches, lag_batches)
    lost = (1.0 / found - 1.0) * _OPTIMIZER_PRICES[optimizer]
    lost *= max(1.0, LEAST_BATCHES / run_batches)
    if global_batch > 1.0:
        place = math.log2(global_batch)
        price = _interpolated(place, _LOG2_LARGER_BATCH, _LARGER_BATCH_PRICES)
        lost = lost * math.pow(global_batch, _LARGER_BATCH_POWER) + price / run_batches
    windows = run_batches * world_size / global_batch / window_batches
    return min(1.0 / (1.0 + lost), math.pow(world_size, -1.0 / max(1.0, windows)))


def table_efficiency(
    policy: str, world_size: int, window_batches: float, lag_batches: float
) -> float:
    """Returns :func:`sample_efficiency` for the table's run length and AdamW."""
    if world_size == 1:
        return 1.0
    per_rank = window_batches / world_size
    place = math.log2(per_rank)
    logarithm = _interpolated(place, _LOG2_WINDOWS, _row("met", world_size))
    if policy == "async" and lag_batches > FREE_LAG * per_rank:
        part = (min(1.0, lag_batches / per_rank) - FREE_LAG) / (1.0 - FREE_LAG)
        late = _interpolated(place, _LOG2_WINDOWS, _row("late", world_size))
        logarithm += part * late
    return math.exp(logarithm)


@lru_cache(maxsize=256)
def _row(table: str, world_size: int) -> tuple[float, ...]:
    """Returns a table's logarithms for this number of ranks; cached for reuse."""
    place = math.log2(world_size)
    columns = zip(*_LOGARITHMS[table], strict=True)
    return tuple(_interpolated(place, _LOG2_RANKS, column) for column in columns)


def _interpolated(x: float, knots: Sequence[float], values: Sequence[float]) -> float:
    """Interpolates linearly; flat before the first knot, last slope beyond the end."""
    if x <= knots[0]:
        return values[0]
    place = next((i for i, k in enumerate(knots) if x <= k), len(knots) - 1)
    low, high = values[place - 1], values[place]
    along = (x - knots[place - 1]) / (knots[place] - knots[place - 1])
    return low + along * (high - low)
