"""Sample cost of each policy, by world size, window and lag.

The figures are those of `docs/convergence.md` and, for two ranks and the longest
windows, of earlier measurements: character models of 64 k and 107 k
parameters, AdamW, global batches or equal drift weights with a Nesterov outer step, one
to eight seeds, runs of 8000 batches. They rank policies and promise nothing about a
given model. What is lost is mostly lost early, as if the run were shorter by so many
batches; in a run of other length it is nearly as many (`_PRICE_GROWTH`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from elche.cadence.throughput import check_int, check_measure
from elche.errors import ConfigError

UPDATES = {"sync": "gradients", "cadence": "parameters", "async": "parameters"}
"""The policies, first the one preferred among equals, and what each averages."""
REFERENCE_BATCHES = 8000.0
"""Batches of all ranks in a run that the table is of."""
FREE_LAG = 1.0 / 3.0
"""Up to this part of a window a late average costs nothing beyond the table."""

# Rows are 2, 4 and 8 ranks, columns batches per rank and window. The optimizer's state
# is local; `async` adopts within a third of the window. Measured: 2 ranks but for the
# last column of `async`, where `cadence` averaged the state; all columns of 4 and 8
# ranks, the first one blocking for both policies, the third of `async` blocking, less
# 0.01 for the lag, the last of `cadence` with averaged state, less 0.02 at 4 ranks.
# `cadence` at 2 ranks was 0.99 to 1.02 (two seeds); short runs say 0.98 to 0.99. The
# last column is of runs of four (8 ranks) to sixteen windows.
_WINDOW_KNOTS = (2.5, 12.5, 50.0, 250.0)
_PRICE_GROWTH = (0.15, 0.4, 0.45, 0.45)
"""With what power of a run's length the batches grow that such windows cost, measured
in runs of 500 to 16 000 (`docs/convergence.md`, "Short runs"); larger global batches
cost the same number in any run."""
_MEASURED_LENGTHS = (500.0, 16_000.0)
_RANK_KNOTS = (2, 4, 8)
_GLOBAL_BATCH_EFFICIENCY = (1.0, 0.97, 0.88)  # of as many batches in one
_WINDOW_EFFICIENCY = {
    "cadence": (
        (0.99, 0.98, 0.89, 0.79),
        (0.91, 0.82, 0.61, 0.39),
        (0.77, 0.61, 0.36, 0.20),
    ),
    "async": (
        (0.99, 0.96, 0.90, 0.80),
        (0.91, 0.78, 0.60, 0.39),
        (0.77, 0.54, 0.35, 0.20),
    ),
}
# What remains of that where an average comes a whole window late. Measured: the second
# column, and the first of 8 ranks.
_WHOLE_LAG_EFFICIENCY = (
    (0.95, 0.95, 0.95, 0.95),
    (0.94, 0.74, 0.74, 0.74),
    (0.88, 0.63, 0.63, 0.63),
)

_LOG2_RANKS = [math.log2(knot) for knot in _RANK_KNOTS]
_LOG2_WINDOWS = [math.log2(knot) for knot in _WINDOW_KNOTS]
_LOG_GLOBAL_BATCH = [math.log(value) for value in _GLOBAL_BATCH_EFFICIENCY]
_LOG_EFFICIENCY = {
    name: [[math.log(value) for value in row] for row in table]
    for name, table in (*_WINDOW_EFFICIENCY.items(), ("late", _WHOLE_LAG_EFFICIENCY))
}


def sample_efficiency(
    policy: str,
    world_size: int,
    window_batches: float,
    lag_batches: float = 0.0,
    *,
    run_batches: float = REFERENCE_BATCHES,
) -> float:
    """Samples that one device needs over those that a policy needs, to one loss.

    A table, linear between its knots in the logarithms of world size, window and
    efficiency, and going on with its last slope beyond them. Windows shorter than the
    first knot count as that.

    ``sync`` takes the steps of one device on the global batch: only the size of that
    matters, not the ranks. A lag costs ``async`` nothing more up to a third of the
    window, and most when it is the whole window: 5 % at two ranks, 26 % at four and
    37 % at eight in windows of some ten batches of each.

    Args:
        policy: ``"sync"``, ``"cadence"`` or ``"async"``.
        world_size: number of ranks, at least 1; one rank loses nothing.
        window_batches: batches of all ranks together between two synchronisations;
            under ``sync`` the global batch in batches of one device.
        lag_batches: batches of the fastest rank from a window's end to the arrival of
            its average; counts for ``async`` only.
        run_batches: of all ranks in the whole run.

    Returns:
        Above 0, at most 1.

    Raises:
        ConfigError: there is no such policy, or a number is out of its range.
    """
    check_policy(policy)
    check_int("world_size", world_size, 1)
    check_measure("lag_batches", lag_batches)
    if not 0.0 < window_batches < math.inf:
        raise ConfigError(f"window_batches must be positive, got {window_batches!r}")
    check_run_batches(run_batches)
    found = unchecked_efficiency(policy, world_size, window_batches, lag_batches)
    lost = (1.0 / found - 1.0) * REFERENCE_BATCHES / run_batches
    if policy != "sync":
        lost *= _price_growth(window_batches / world_size, run_batches)
    return 1.0 / (1.0 + lost)


def _price_growth(batches_per_rank: float, run_batches: float) -> float:
    """How many more batches windows cost in such a run than in one of the table."""
    least, most = _MEASURED_LENGTHS
    length = min(max(run_batches, least), most) / REFERENCE_BATCHES
    place = math.log2(batches_per_rank)
    power = _interpolated(min(place, _LOG2_WINDOWS[-1]), _LOG2_WINDOWS, _PRICE_GROWTH)
    return math.pow(length, power)


def check_run_batches(run_batches: float) -> float:
    """Checks the length of a run.

    Raises:
        ConfigError: it is not a positive finite number.
    """
    if check_measure("run_batches", run_batches) <= 0.0:
        raise ConfigError(f"run_batches must be positive, got {run_batches!r}")
    return run_batches


def unchecked_efficiency(
    policy: str, world_size: int, window_batches: float, lag_batches: float
) -> float:
    """:func:`sample_efficiency` in a run as the table's, of what is in range."""
    if world_size == 1:
        return 1.0
    if policy == "sync":
        batches = max(float(window_batches), 1.0)
        return math.exp(
            _interpolated(math.log2(batches), _LOG2_RANKS, _LOG_GLOBAL_BATCH)
        )
    per_rank = window_batches / world_size
    place = math.log2(per_rank)
    logarithm = _interpolated(place, _LOG2_WINDOWS, _row(policy, world_size))
    if policy == "async" and lag_batches > FREE_LAG * per_rank:
        part = (min(1.0, lag_batches / per_rank) - FREE_LAG) / (1.0 - FREE_LAG)
        late = _interpolated(place, _LOG2_WINDOWS, _row("late", world_size))
        logarithm += part * late
    return math.exp(logarithm)


def check_policy(policy: str) -> None:
    """Checks that there is such a policy.

    Raises:
        ConfigError: there is none.
    """
    if policy not in UPDATES:
        raise ConfigError(
            f"expected one of the policies {', '.join(UPDATES)}, got {policy!r}"
        )


@lru_cache(maxsize=256)
def _row(table: str, world_size: int) -> tuple[float, ...]:
    """Logarithms of a table's columns for so many ranks: looked up for many windows."""
    place = math.log2(world_size)
    columns = zip(*_LOG_EFFICIENCY[table], strict=True)
    return tuple(_interpolated(place, _LOG2_RANKS, column) for column in columns)


def _interpolated(x: float, knots: Sequence[float], values: Sequence[float]) -> float:
    """Linear: flat before the first knot, its last slope after all."""
    if x <= knots[0]:
        return values[0]
    place = next((i for i, k in enumerate(knots) if x <= k), len(knots) - 1)
    low, high = values[place - 1], values[place]
    along = (x - knots[place - 1]) / (knots[place] - knots[place - 1])
    return low + along * (high - low)
