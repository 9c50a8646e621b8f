"""Step time of a schedule: an event simulation of its action lists.

A rank runs its actions in order, each as soon as the rank is free and its inputs have
arrived. A message leaves at the end of its computation (in a lowered schedule: at its
send) and arrives after the link's time. It keeps neither rank busy.

There are two bubble rates. Each is 1 - (work of the busiest rank) / (a time):

- ``bubble_makespan`` takes the time until the last rank ends: the cost of a step that
  ends in a synchronisation (gradient-norm clipping, an all-rank barrier).
- ``bubble_span`` takes the longest time from a rank's own first action to its own
  last: the metric of the zero-bubble paper, reached only where no barrier ends a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elche.errors import ConfigError
from elche.schedule.actions import Schedule
from elche.schedule.codes import Rows, check_schedule, decode_one, encode
from elche.schedule.costs import PipelineCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of a step, in the unit of the costs.

    Attributes:
        makespan: time from the first start of an action to the last end.
        spans: time from each rank's first action to the end of its last.
        busy: time that each rank computes.
        peak_activations: peak activation memory of each rank, in the units of
            `StageCost.activation`.
        action_starts: start of every action of each rank, in its order.
    """

    makespan: float
    spans: tuple[float, ...]
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]
    action_starts: tuple[tuple[float, ...], ...]

    @property
    def bubble_makespan(self) -> float:
        """Fraction of the makespan in which the busiest rank idles."""
        return _lost(max(self.busy), self.makespan)

    @property
    def bubble_span(self) -> float:
        """Fraction of the longest span beyond the busiest rank's work."""
        return _lost(max(self.busy), max(self.spans))

    @property
    def bubble_per_rank(self) -> tuple[float, ...]:
        """Fraction of the makespan in which each rank idles."""
        return tuple(_lost(busy, self.makespan) for busy in self.busy)


class CostTable:
    """Costs in flat lists, for the inner loops.

    Attributes:
        durations: durations by ``stage * 8 + kind``; 0 for sends and receives.
        releases: memory that an action frees at its end (negative: allocates at its
            start), indexed likewise.
        links: time of a message between each stage and the next.
        rank_of: the rank of each stage.
        work: compute time of each rank per microbatch, with the cheaper of B and I + W.
    """

    def __init__(self, costs: PipelineCosts) -> None:
        self.num_stages = len(costs.stages)
        self.num_ranks = costs.num_ranks
        self.rank_of = costs.placement
        self.limits = costs.limits
        self.links = tuple(costs.link(stage) for stage in range(self.num_stages - 1))
        self.durations: list[float] = []
        self.releases: list[float] = []
        self.work = [0.0] * costs.num_ranks
        for one, rank in zip(costs.stages, costs.placement, strict=True):
            split = one.input_gradient + one.weight_gradient
            self.work[rank] += one.forward + min(one.full_backward, split)
            self.durations += [
                *(one.forward, one.full_backward),
                *(one.input_gradient, one.weight_gradient),
                *(0.0, 0.0, 0.0, 0.0),
            ]
            self.releases += [
                *(-one.activation, one.activation),
                *(0.0, one.activation),
                *(0.0, 0.0, 0.0, 0.0),
            ]


def simulate(schedule: Schedule, costs: PipelineCosts) -> Timing:
    """Times a schedule, compute only or lowered.

    Raises:
        ConfigError: the costs are for another placement, an action is missing, twice,
            or on the wrong rank, or the schedule deadlocks.
    """
    if costs.placement != schedule.placement or costs.num_ranks != schedule.num_ranks:
        raise ConfigError(
            f"the costs place stages on ranks {list(costs.placement)} of "
            f"{costs.num_ranks}, the schedule {schedule.name} on "
            f"{list(schedule.placement)} of {schedule.num_ranks}"
        )
    check_schedule(schedule)
    table = CostTable(costs)
    rows, count = encode(schedule), schedule.num_microbatches
    starts = run_rows(rows, table, count, schedule.is_lowered)
    busy, spans = [], []
    for row, times in zip(rows, starts, strict=True):
        took = [table.durations[(code >> 3) // count * 8 + (code & 7)] for code in row]
        busy.append(sum(took))
        spans.append(times[-1] + took[-1] - times[0] if row else 0.0)
    return Timing(
        makespan=makespan_of(rows, starts, table, count),
        spans=tuple(spans),
        busy=tuple(busy),
        peak_activations=tuple(peaks(rows, table, count)),
        action_starts=tuple(map(tuple, starts)),
    )


def run_rows(
    rows: Rows,
    table: CostTable,
    count: int,
    is_lowered: bool = False,
    bursts: list[tuple[int, int]] | None = None,
) -> list[list[float]]:
    """Start times of all actions.

    Args:
        rows: codes of each rank; each stage's F precedes its I, I precedes W.
        table: the costs.
        count: number of microbatches.
        is_lowered: messages leave at the sends in `rows`, else with the computation.
        bursts: output, the order of the simulation, which respects all dependencies:
            pairs of a rank and its number of consecutive actions.
    """
    durations, links, rank_of = table.durations, table.links, table.rank_of
    last = table.num_stages - 1
    # True where a stage and the next one exchange results without sends.
    direct = [not is_lowered or rank_of[s] == rank_of[s + 1] for s in range(last)]
    forward_at = [0.0] * count + [-1.0] * (last * count)
    backward_at = [-1.0] * (last * count) + [0.0] * count
    num_ranks = len(rows)
    starts: list[list[float]] = [[] for _ in rows]
    clocks = [0.0] * num_ranks
    waiting = [-1] * num_ranks
    runnable = list(range(num_ranks - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        row, begun, clock = rows[rank], starts[rank], clocks[rank]
        first = len(begun)
        for position in range(first, len(row)):
            code = row[position]
            index, kind = code >> 3, code & 7
            if kind == 0:
                ready = forward_at[index]
            elif kind < 3:
                ready = backward_at[index]
            else:
                ready = 0.0
            if ready < 0:
                waiting[rank] = index * 2 + (kind == 0)
                break
            if ready > clock:
                clock = ready
            begun.append(clock)
            stage = index // count
            clock += durations[stage * 8 + kind]
            if (kind == 0 and stage < last and direct[stage]) or kind == 4:
                index += count
                forward_at[index] = clock + links[stage]
                other = rank_of[stage + 1]
                if waiting[other] == index * 2 + 1:
                    waiting[other] = -1
                    runnable.append(other)
            elif (0 < kind < 3 and stage > 0 and direct[stage - 1]) or kind == 6:
                index -= count
                backward_at[index] = clock + links[stage - 1]
                other = rank_of[stage - 1]
                if waiting[other] == index * 2:
                    waiting[other] = -1
                    runnable.append(other)
        if bursts is not None:
            bursts.append((rank, len(begun) - first))
        clocks[rank] = clock
    if any(len(begun) < len(row) for begun, row in zip(starts, rows, strict=True)):
        raise ConfigError(_deadlock(rows, [len(begun) for begun in starts], count))
    return starts


def makespan_of(
    rows: Rows, starts: list[list[float]], table: CostTable, count: int
) -> float:
    """Time of the whole step, computed from the start times of `run_rows`."""
    ends = (
        times[-1] + table.durations[(row[-1] >> 3) // count * 8 + (row[-1] & 7)]
        for row, times in zip(rows, starts, strict=True)
        if row
    )
    return max(ends) - min(times[0] for times in starts if times)


def peaks(rows: Rows, table: CostTable, count: int) -> list[float]:
    """Peak activation memory of each rank."""
    releases = table.releases
    found = []
    for row in rows:
        held = most = 0.0
        for code in row:
            held -= releases[(code >> 3) // count * 8 + (code & 7)]
            if held > most:
                most = held
        found.append(round(most, 9))
    return found


def _lost(work: float, time: float) -> float:
    return 1.0 - work / time if time > 0 else 0.0


def _deadlock(rows: Rows, positions: Sequence[int], count: int) -> str:
    stuck = [
        f"\n  rank {rank} stops at its action {position}, "
        f"{decode_one(row[position], count)}"
        for rank, (row, position) in enumerate(zip(rows, positions, strict=True))
        if position < len(row)
    ]
    return (
        "the schedule deadlocks; each of these waits for another (F for the F of the "
        f"stage before, I and B for that of the stage after):{''.join(stuck)}"
    )
