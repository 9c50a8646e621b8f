"""Sends and receives for a schedule, and the proof that it cannot deadlock.

Each message between two ranks gets a send right after the computation that makes it.
Its receive is placed at the same simulated time on the other rank, before the next
computation there: it is posted early, and waited for where it is needed (as torch's
``_add_send_recv`` does). Both ranks of a pair list their messages in the same order, as
transports without tags require.

The proof assumes the strictest transport: a send ends only when the other rank has
reached the matching receive, and a receive ends only with its send. A schedule that
completes there completes with any amount of buffering, since buffers only let ranks
run ahead.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import chain, islice, pairwise
from operator import itemgetter

from elche.errors import ConfigError
from elche.schedule.actions import Kind, Schedule, StageAction
from elche.schedule.codes import check_schedule, encode
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.timing import CostTable, run_rows

_UNIT = StageCost(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
_STEPS = {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: -1, Kind.FULL_BACKWARD: -1}
"""Offset, in stages, to the receiver of a computation's result."""


def lower(schedule: Schedule, costs: PipelineCosts | None = None) -> Schedule:
    """Adds sends and receives to a compute-only schedule, for any placement.

    The costs determine the positions of receives; None means equal times.

    Raises:
        ConfigError: the schedule is already lowered, incomplete, or deadlocks; the
            message lists the offending actions.
    """
    if schedule.is_lowered:
        raise ConfigError(f"schedule {schedule.name} has sends and receives already")
    check_schedule(schedule)
    table = CostTable(
        costs
        or PipelineCosts(
            stages=(_UNIT,) * schedule.num_stages,
            placement=schedule.placement,
            num_ranks=schedule.num_ranks,
        )
    )
    count = schedule.num_microbatches
    bursts: list[tuple[int, int]] = []
    starts = run_rows(encode(schedule), table, count, bursts=bursts)
    lowered: list[list[StageAction]] = [[] for _ in schedule.actions]
    for rank, one in _in_order(schedule, starts, bursts):
        lowered[rank].append(one)
        message = _message_after(one, schedule.placement)
        if message is not None:
            send, receive = message
            lowered[rank].append(send)
            lowered[schedule.placement[receive.stage]].append(receive)
    result = Schedule(
        name=schedule.name,
        num_microbatches=count,
        placement=schedule.placement,
        actions=tuple(map(tuple, lowered)),
    )
    check_deadlock_free(result)
    return result


def check_deadlock_free(schedule: Schedule) -> None:
    """Proves that a lowered schedule completes on every transport.

    In the graph of actions each send and its receive are one node, which depends on the
    actions before both. The schedule completes if the graph has no cycle.

    Raises:
        ConfigError: messages are missing, or ranks deadlock; the message lists the
            actions of a cycle.
    """
    check_schedule(schedule)
    send_of = _sends(schedule)
    graph: TopologicalSorter[StageAction] = TopologicalSorter()
    for row in schedule.actions:
        for before, one in pairwise(send_of.get(one, one) for one in row):
            graph.add(one, before)
        for one in row:
            step = _STEPS.get(one.kind)
            message = _message_after(one, schedule.placement)
            result = message[0] if message else one
            if message:
                graph.add(result, one)
            for kind, way in _STEPS.items():
                if way == step:
                    to = StageAction(one.stage + way, kind, one.microbatch)
                    graph.add(to, result)
    try:
        graph.prepare()
    except CycleError as error:
        cycle = " needs ".join(map(str, reversed(error.args[1])))
        raise ConfigError(
            f"schedule {schedule.name} cannot be proven free of deadlock: if a send "
            f"waits for its receive, {cycle}"
        ) from None


def _in_order(
    schedule: Schedule, starts: list[list[float]], bursts: list[tuple[int, int]]
) -> list[tuple[int, StageAction]]:
    """Every action with its rank, sorted by start time; dependencies come first.

    A dependency never starts after its action. If both start together (zero duration),
    the stable sort keeps the simulation's order.
    """
    rows = [
        zip(*pair, strict=True) for pair in zip(starts, schedule.actions, strict=True)
    ]
    events = [
        (start, rank, one)
        for rank, length in bursts
        for start, one in islice(rows[rank], length)
    ]
    events.sort(key=itemgetter(0))
    return [(rank, one) for _, rank, one in events]


def _message_after(
    one: StageAction, placement: tuple[int, ...]
) -> tuple[StageAction, StageAction] | None:
    """The send and the receive that follow an action, or None."""
    step = _STEPS.get(one.kind, 0)
    other = one.stage + step
    is_inside = step and 0 <= other < len(placement)
    if not is_inside or placement[other] == placement[one.stage]:
        return None
    is_forward = step > 0
    send = Kind.SEND_F if is_forward else Kind.SEND_B
    receive = Kind.RECV_F if is_forward else Kind.RECV_B
    return (
        StageAction(one.stage, send, one.microbatch),
        StageAction(other, receive, one.microbatch),
    )


def _sends(schedule: Schedule) -> dict[StageAction, StageAction]:
    """Maps each receive to its send."""
    actions = list(chain.from_iterable(schedule.actions))
    found = (_message_after(one, schedule.placement) for one in actions)
    send_of = {receive: send for send, receive in filter(None, found)}
    wanted = {*send_of, *send_of.values()}
    present = {one for one in actions if not one.is_compute}
    for wrong, verdict in (
        (wanted - present, "lacks"),
        (present - wanted, "has but does not need"),
    ):
        if wrong:
            shown = ", ".join(map(str, sorted(wrong)[:6]))
            raise ConfigError(
                f"schedule {schedule.name} {verdict} {shown}"
                f"{' and more' if len(wrong) > 6 else ''}"
            )
    return send_of
