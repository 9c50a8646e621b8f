"""List schedules that depart from the rules at random, for short schedules.

Where a schedule has few actions the rules of `list_scheduling` can be far from the
optimum (a quarter, with memory for little more than one microbatch), and hundreds of
tries cost nothing. (Randomised list scheduling, as in Feo and Resende's GRASP, 1995.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from elche.schedule.codes import F, Rows
from elche.schedule.generators.list_scheduling import Choice, ListScheduler, Rule
from elche.schedule.timing import CostTable

_PATIENCE = (1.0, 0.5, 0.0)
_BOLDNESS = (0.1, 0.3)  # how often a choice departs from the rule


def shaken_schedule(
    table: CostTable,
    count: int,
    limits: Sequence[float],
    random: Random,
    most: float = math.inf,
) -> Rows:
    """Schedules everything by a random rule, with departures from it.

    Args:
        table: the costs.
        count: microbatches.
        limits: memory of each rank; at least one microbatch of all of its stages.
        random: seeded, so that all ranks draw the same.
        most: a makespan that is known.

    Returns:
        Codes of each rank; empty if they would take `most` or longer.
    """
    rule = Rule(
        patience=random.choice(_PATIENCE),
        oldest_first=random.random() < 0.5,
        deep_first=random.random() < 0.5,
    )
    scheduler = ListScheduler(table, count, limits, rule)
    return scheduler.run(_at_random(scheduler, random), most)


def _at_random(scheduler: ListScheduler, random: Random) -> Choice:
    """Chooses as the rule does, or else anything that is ready, or a W."""
    by_rule, boldness = scheduler.by_rule(), random.choice(_BOLDNESS)
    count, kinds = scheduler.count, scheduler.backward_kind
    forward_at, backward_at = scheduler.forward_at, scheduler.backward_at

    def choose(rank: int, now: float) -> tuple[int, float, bool]:
        code, ready_at, blocked = by_rule(rank, now)
        if code < 0 or random.random() >= boldness:
            return code, ready_at, blocked
        ready = [-1] if scheduler.weights[rank] else []
        for stage in scheduler.stages_of[rank]:
            index = stage * count
            each = scheduler.next_backward[stage]
            if each < count and 0 <= backward_at[index + each] <= now:
                ready.append((index + each) * 8 + kinds[stage])
            each = scheduler.next_forward[stage]
            has_room = scheduler.held[rank] <= scheduler.room[stage]
            if has_room and each < count and 0 <= forward_at[index + each] <= now:
                ready.append((index + each) * 8 + F)
        code = random.choice(ready)
        return code, now, code < 0

    return choose
