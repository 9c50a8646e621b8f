"""How many samples a policy costs, by world size, window and lag.

The figures are those of the prototypes that the design rests on (a character model of
107 k parameters, AdamW, global batches or equal drift weights with a Nesterov outer
step, one to three seeds), until the convergence table of the data plane exists. They
are small runs: they rank policies, they promise nothing about a given model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elche.cadence.throughput import check_int, check_measure
from elche.errors import ConfigError

UPDATES = {"sync": "gradients", "cadence": "parameters", "async": "parameters"}
"""The policies, first the one preferred among equals, and what each averages."""
WHOLE_LAG_COST = 0.05
"""Sample efficiency lost when an average arrives a whole window late."""
FREE_LAG = 1.0 / 3.0
"""Up to this part of a window a late average costs nothing measurable."""

# Rows are 2, 4 and 8 ranks, columns batches per rank and window. `cadence` averages the
# optimizer's state, `async` keeps it local and adopts 4 batches late. Measured: 2 ranks
# but for the last column of `async`, and the second column. The third column of 4 and 8
# ranks is the second times what it loses with the outer step (0.7, 0.5), the remaining
# ones follow the slope of the row above.
_WINDOW_KNOTS = (2.5, 12.5, 50.0, 250.0)
_RANK_KNOTS = (2, 4, 8)
_GLOBAL_BATCH_EFFICIENCY = (1.0, 0.97, 0.87)  # of as many batches in one
_WINDOW_EFFICIENCY = {
    "cadence": (
        (1.00, 1.00, 0.89, 0.79),
        (0.86, 0.86, 0.71, 0.63),
        (0.70, 0.70, 0.53, 0.47),
    ),
    "async": (
        (0.99, 0.96, 0.90, 0.80),
        (0.79, 0.79, 0.65, 0.58),
        (0.55, 0.55, 0.42, 0.37),
    ),
}


def sample_efficiency(
    policy: str, world_size: int, window_batches: float, lag_batches: float = 0.0
) -> float:
    """Samples that one device needs over those that a policy needs, to one loss.

    A table, linear between its knots in the logarithms of world size, window and
    efficiency, and going on with its last slope beyond them. Windows shorter than the
    first knot count as that.

    ``sync`` takes the steps of one device on the global batch: only the size of that
    matters, not the ranks. A lag costs ``async`` nothing up to a third of the window,
    and 5 % when it is the whole window.

    Args:
        policy: ``"sync"``, ``"cadence"`` or ``"async"``.
        world_size: number of ranks, at least 1; one rank loses nothing.
        window_batches: batches of all ranks together between two synchronisations;
            under ``sync`` the global batch in batches of one device.
        lag_batches: batches of the fastest rank from a window's end to the arrival of
            its average; counts for ``async`` only.

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
    if world_size == 1:
        return 1.0
    ranks = [math.log2(knot) for knot in _RANK_KNOTS]
    if policy == "sync":
        batches = max(float(window_batches), 1.0)
        return _interpolated(math.log2(batches), ranks, _GLOBAL_BATCH_EFFICIENCY)
    per_rank = window_batches / world_size
    windows = [math.log2(knot) for knot in _WINDOW_KNOTS]
    at_window = [
        _interpolated(math.log2(per_rank), windows, row)
        for row in _WINDOW_EFFICIENCY[policy]
    ]
    efficiency = _interpolated(math.log2(world_size), ranks, at_window)
    if policy == "async":
        late = min(1.0, lag_batches / per_rank)
        costs = max(0.0, late - FREE_LAG) / (1.0 - FREE_LAG)
        efficiency *= 1.0 - WHOLE_LAG_COST * costs
    return efficiency


def check_policy(policy: str) -> None:
    """Checks that there is such a policy.

    Raises:
        ConfigError: there is none.
    """
    if policy not in UPDATES:
        raise ConfigError(
            f"expected one of the policies {', '.join(UPDATES)}, got {policy!r}"
        )


def _interpolated(
    x: float, knots: Sequence[float], efficiencies: Sequence[float]
) -> float:
    """Linear in the logarithm: flat before the first knot, its last slope after all."""
    if x <= knots[0]:
        return efficiencies[0]
    place = next((i for i, k in enumerate(knots) if x <= k), len(knots) - 1)
    low, high = math.log(efficiencies[place - 1]), math.log(efficiencies[place])
    along = (x - knots[place - 1]) / (knots[place] - knots[place - 1])
    return math.exp(low + along * (high - low))
