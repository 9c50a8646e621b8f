"""The published schedules by name."""

from __future__ import annotations

from difflib import get_close_matches

from elche.config_checks import check_whole
from elche.errors import ConfigError
from elche.schedule.actions import (
    Schedule,
    check_microbatches,
    loop_placement,
    v_placement,
)
from elche.schedule.codes import Rows, decode, spread
from elche.schedule.costs import PipelineCosts, renumbered
from elche.schedule.generators.list_scheduling import list_schedule
from elche.schedule.generators.looped import (
    LOOPED,
    ONE_STAGE,
    gpipe_rows,
    looped_rows,
)
from elche.schedule.generators.v_shape import (
    V_HALF_STEPS,
    V_MIN_STEPS,
    block_rows,
    zb_v_rows,
)
from elche.schedule.timing import CostTable, makespan_of, peaks, run_rows

V_SHAPED = ("zb-v", "v-half", "v-min")
FIXED_SCHEDULES = ("gpipe", *ONE_STAGE, *LOOPED, *V_SHAPED)


def placement_for(
    name: str, num_ranks: int, stages_per_rank: int | None = None
) -> tuple[int, ...]:
    """The rank of each stage in a published schedule.

    Args:
        name: schedule's name, one of `FIXED_SCHEDULES`.
        num_ranks: number of ranks.
        stages_per_rank: stages per rank; None means 2 for interleaved schedules and
            those in V placement, else 1.

    Raises:
        ConfigError: unknown schedule, or a wrong number of stages.
    """
    check_name(name)
    check_whole("the number of ranks", num_ranks, 1)
    several = name in LOOPED + V_SHAPED
    each = stages_per_rank or (2 if several else 1)
    if name in ONE_STAGE and each != 1:
        raise ConfigError(f"{name} has one stage per rank, got {each}")
    if name in V_SHAPED and each != 2:
        raise ConfigError(f"{name} has two stages per rank, got {each}")
    if name in V_SHAPED:
        return v_placement(num_ranks)
    return loop_placement(num_ranks, each)


def fits_placement(name: str, costs: PipelineCosts) -> bool:
    """True if a published schedule is defined for the placement of the costs.

    Ranks may be in any order, and some may have no stage: only the order of stages, and
    which of them share a rank, matter.
    """
    if name == "gpipe":
        return True
    costs, _ = renumbered(costs)
    each = len(costs.stages) // costs.num_ranks if name in LOOPED else None
    return costs.placement == placement_for(name, costs.num_ranks, each)


def make_schedule(name: str, costs: PipelineCosts, num_microbatches: int) -> Schedule:
    """Makes a published schedule, compute only.

    Args:
        name: schedule's name, one of `FIXED_SCHEDULES`.
        costs: costs of the stages in the schedule's placement (`placement_for`), with
            the ranks in any order. The order of actions depends on them only in zb-v,
            v-half and v-min, whose W fill gaps.
        num_microbatches: microbatches per step.

    Raises:
        ConfigError: unknown schedule, wrong placement, unsupported number of
            microbatches, or more memory than the costs' limits.
    """
    check_name(name)
    check_microbatches(num_microbatches)
    if not fits_placement(name, costs):
        raise ConfigError(
            f"{name} is not defined for {len(costs.stages)} stages on ranks "
            f"{list(costs.placement)}; see placement_for, or use auto"
        )
    ordered, order = renumbered(costs)
    table = CostTable(ordered)
    rows = fixed_rows(name, table, num_microbatches)
    for rank, peak, limit in zip(
        order, peaks(rows, table, num_microbatches), ordered.limits, strict=True
    ):
        if peak > limit + 1e-9:
            raise ConfigError(
                f"{name} holds up to {peak:g} units of activations on rank {rank}, "
                f"above its memory limit of {limit:g}; use auto, which finds the best "
                "schedule within the limit, or larger memory or smaller microbatches"
            )
    rows = spread(rows, order, costs.num_ranks)
    return decode(name, rows, costs.placement, num_microbatches)


def fixed_rows(name: str, table: CostTable, count: int) -> Rows:
    """Codes of a published schedule, in its version of least makespan.

    Arguments and errors as in `fixed_orders`.
    """
    versions = [
        rows if held is None else list_schedule(table, count, orders=rows, limits=held)
        for rows, held in fixed_orders(name, table, count)
    ]
    if len(versions) == 1:
        return versions[0]
    return min(
        versions,
        key=lambda rows: makespan_of(rows, run_rows(rows, table, count), table, count),
    )


def fixed_orders(
    name: str, table: CostTable, count: int
) -> list[tuple[Rows, list[float] | None]]:
    """Versions of a published schedule; `fixed_rows` uses the shortest.

    A version has None, or each rank's memory limit for `list_schedule`, which then
    moves every W into gaps; zb-v has both. The costs must be `renumbered`.
    """
    ranks = table.num_ranks
    if name == "gpipe":
        return [(gpipe_rows(table.rank_of, ranks, count), None)]
    if name in ONE_STAGE + LOOPED:
        return [(looped_rows(name, ranks, table.num_stages // ranks, count), None)]
    if name == "zb-v":
        rows = zb_v_rows(ranks, count)
        return [(rows, None), (rows, peaks(rows, table, count))]
    # The limits are about one half and one third of the microbatches of 1F1B.
    is_half = name == "v-half"
    steps = V_HALF_STEPS if is_half else V_MIN_STEPS
    bound = min(count, (ranks + 2) // 2 if is_half else (ranks + 4) // 3)
    held = [0.0] * ranks
    for stage, rank in enumerate(table.rank_of):
        held[rank] -= bound * table.releases[stage * 8]
    return [(block_rows(ranks, count, steps), held)]


def check_name(name: str) -> None:
    """Raises ConfigError unless a name is one of `FIXED_SCHEDULES`."""
    if name not in FIXED_SCHEDULES:
        known = (*FIXED_SCHEDULES, "auto")
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"expected a schedule among {', '.join(known)}, got {name!r}{hint}"
        )
