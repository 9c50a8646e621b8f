"""Sample cost of windows, by world size, window, lag, run length and optimizer.

The figures are those of `docs/convergence.md`: a character model of 64 k parameters,
virtual ranks whose local steps take a part of the one device's batch, equal weights of
deltas with a Nesterov outer step, one to three seeds. They rank policies and promise
nothing about a given model. At equal global batch windows cost about the same part of
runs of 500, 2000 and 8000 batches. Steps of `sync` are those of one device and cost
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

UPDATES = {"sync": "gradients", "cadence": "parameters", "async": "parameters"}
"""The policies, first the one preferred among equals, and what each averages."""
REFERENCE_BATCHES = 2000.0
"""Batches of one device in a run that the table is of."""
LEAST_BATCHES = 500.0
"""The shortest run measured; a shorter one is taken to lose as many batches."""
FREE_LAG = 1.0 / 3.0
"""Up to this part of a window a late average costs nothing beyond the table."""

# Rows are 2, 4 and 8 ranks, columns local batches per rank and window. AdamW, the
# optimizer's state local, blocking; a lag within a third of the window cost nothing.
# Measured in runs of 2000 batches; at four and eight ranks the first column lies
# between those (0.95 and 0.87) and runs of 8000 (0.92 and 0.74, not tuned). Beyond the
# last column its slope goes on: in a former study it fell faster there.
_WINDOW_KNOTS = (2.5, 12.5, 50.0)
_RANK_KNOTS = (2, 4, 8)
_EFFICIENCY = ((0.98, 0.96, 0.88), (0.94, 0.91, 0.76), (0.82, 0.76, 0.46))
# What remains of that where an average comes a whole window late. Measured: 0.97 and
# 0.85 in the first two columns of four ranks. The second, of two seeds, lies between
# that and a former study's 0.74; other rows and longer windows follow the former ones
# (0.95; 0.88 and 0.63) likewise.
_WHOLE_LAG_EFFICIENCY = ((0.97, 0.95, 0.95), (0.97, 0.80, 0.80), (0.92, 0.70, 0.70))
_OPTIMIZER_PRICES = {"adam": 1.0, "sgd": 0.3, "muon": 1.0}
"""Kinds of optimizers, and what windows cost with each, as a part of AdamW's price.

Muon: 0.93 and 0.83 at four and eight ranks (one seed). SGD lost nothing at either, but
its runs scatter by as much as a third of AdamW's price.
"""

_LARGER_BATCH_KNOTS = (2, 4, 8)
_LARGER_BATCH_PRICES = (0.0, 250.0, 1060.0)
"""Batches of one device that a global batch of so many of its costs: the same in runs
of 1000, 2000 and 8000 (former study; above eight its last slope)."""
_LARGER_BATCH_POWER = 0.6
"""With what power of that windows cost more: within 0.1 of the former study's runs of
1000 and 2000 batches; too dear in longer ones."""

_LOG2_LARGER_BATCH = [math.log2(knot) for knot in _LARGER_BATCH_KNOTS]
_LOG2_RANKS = [math.log2(knot) for knot in _RANK_KNOTS]
_LOG2_WINDOWS = [math.log2(knot) for knot in _WINDOW_KNOTS]
_LOGARITHMS = {
    name: [[math.log(value) for value in row] for row in table]
    for name, table in (("met", _EFFICIENCY), ("late", _WHOLE_LAG_EFFICIENCY))
}


def optimizer_kind(names: Iterable[str]) -> str:
    """Kind of the optimizers that step a model, by the names of their classes.

    Args:
        names: of the classes. Muon beside another one counts as Muon; what is neither
            that nor SGD alone as Adam, the dearest.
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
    """Samples that one device needs over those that a policy needs, to one loss.

    A table, linear between its knots in the logarithms of world size, window and
    efficiency, and going on with its last slope beyond them. Windows shorter than the
    first knot count as that. A lag costs ``async`` nothing more up to a third of the
    window, and most when it is the whole window.

    The table is of ten windows or more in a run. In one, each rank trains on its part
    of the samples to the end, and they learn one part: less than the fastest device
    alone would. In a run of n windows at most the n-th root of a part counts, which is
    more than any cell of the table.

    Args:
        policy: ``"sync"``, ``"cadence"`` or ``"async"``.
        world_size: number of ranks, at least 1; one rank loses nothing.
        window_batches: local batches of all ranks between two synchronisations.
        lag_batches: local batches of the fastest rank from a window's end to the
            arrival of its average; counts for ``async`` only.
        run_batches: of the one device, in the whole run.
        global_batch: batches of the one device that a local batch of each rank adds up
            to: above 1 where local batches are larger than the part that is their due.
        optimizer: a kind, see :func:`optimizer_kind`.

    Returns:
        Above 0, at most 1.
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
    """:func:`sample_efficiency` in a run as long as the table's, with AdamW."""
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
    """Logarithms of a table's columns for so many ranks: looked up for many windows."""
    place = math.log2(world_size)
    columns = zip(*_LOGARITHMS[table], strict=True)
    return tuple(_interpolated(place, _LOG2_RANKS, column) for column in columns)


def _interpolated(x: float, knots: Sequence[float], values: Sequence[float]) -> float:
    """Linear: flat before the first knot, its last slope after all."""
    if x <= knots[0]:
        return values[0]
    place = next((i for i, k in enumerate(knots) if x <= k), len(knots) - 1)
    low, high = values[place - 1], values[place]
    along = (x - knots[place - 1]) / (knots[place] - knots[place - 1])
    return low + along * (high - low)
