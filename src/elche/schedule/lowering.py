"""Sends and receives for a schedule, and the proof that it cannot deadlock.

Each message between two ranks gets a send right after the computation that makes it.
Its receive is placed on the other rank at the same moment of a simulated run, so before
the computation that this rank then runs: posted early, waited for where it is needed
(as torch's ``_add_send_recv`` does). Both ranks of a pair list their messages in the
same order, which transports without tags need.

The proof assumes the strictest transport: a send ends only when the other rank has
reached the matching receive, and a receive ends only with its send. A schedule that
completes there completes with any amount of buffering, since buffers only let ranks
run ahead.
"""

from __future__ import annotations

from itertools import chain

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

    Args:
        schedule: schedule without sends and receives.
        costs: costs that determine the positions of receives; None means equal times.

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

    Args:
        schedule: schedule with sends and receives.

    Raises:
        ConfigError: messages are missing, or ranks deadlock; the message lists each
            rank's offending action.
    """
    check_schedule(schedule)
    partners, waits = _dependencies(schedule)
    rows = schedule.actions
    positions = [0] * len(rows)
    runnable = list(range(len(rows)))
    done: set[StageAction] = set()
    while runnable:
        rank = runnable.pop()
        row = rows[rank]
        while positions[rank] < len(row):
            one = row[positions[rank]]
            partner = partners.get(one)
            both = {one, partner or one}
            if not all(each not in waits or waits[each] in done for each in both):
                break
            if partner is not None:
                other = schedule.placement[partner.stage]
                at = positions[other]
                if at == len(rows[other]) or rows[other][at] != partner:
                    break
                positions[other] += 1
                runnable.append(other)
            done |= both
            positions[rank] += 1
    if any(at < len(row) for at, row in zip(positions, rows, strict=True)):
        raise ConfigError(_stuck(schedule, positions, partners, waits, done))


def _in_order(
    schedule: Schedule, starts: list[list[float]], bursts: list[tuple[int, int]]
) -> list[tuple[int, StageAction]]:
    """Every action with its rank, by start time, after its dependencies.

    A dependency never starts after its action. If both start together (actions without
    duration) the order of the simulation decides, which the stable sort keeps.
    """
    positions = [0] * schedule.num_ranks
    events = []
    for rank, length in bursts:
        at = positions[rank]
        positions[rank] = at + length
        row = zip(
            starts[rank][at : at + length], schedule.actions[rank][at:], strict=False
        )
        events += [(start, rank, one) for start, one in row]
    events.sort(key=lambda event: event[0])
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


_Links = dict[StageAction, StageAction]


def _dependencies(schedule: Schedule) -> tuple[_Links, _Links]:
    """The peer of each send and receive; the dependency of each send or computation.

    Raises:
        ConfigError: messages are missing or superfluous.
    """
    partners: _Links = {}
    waits: _Links = {}
    for one in chain.from_iterable(schedule.actions):
        result = one
        if message := _message_after(one, schedule.placement):
            send, result = message
            partners |= {send: result, result: send}
            waits[send] = one
        step = _STEPS.get(one.kind)
        for kind in (kind for kind in _STEPS if _STEPS[kind] == step):
            waits[StageAction(one.stage + _STEPS[kind], kind, one.microbatch)] = result
    present = {one for row in schedule.actions for one in row if not one.is_compute}
    for wrong, verdict in (
        (partners.keys() - present, "lacks"),
        (present - partners.keys(), "has but does not need"),
    ):
        if wrong:
            shown = ", ".join(map(str, sorted(wrong)[:6]))
            raise ConfigError(
                f"schedule {schedule.name} {verdict} {shown}"
                f"{' and more' if len(wrong) > 6 else ''}"
            )
    return partners, waits


def _stuck(
    schedule: Schedule,
    positions: list[int],
    partners: _Links,
    waits: _Links,
    done: set[StageAction],
) -> str:
    lines = []
    for rank, (row, at) in enumerate(zip(schedule.actions, positions, strict=True)):
        if at == len(row):
            continue
        one = row[at]
        if one.is_compute:
            reason = "its input has not come"
        elif one in waits and waits[one] not in done:
            reason = "what it sends has not been computed"
        else:
            partner = partners[one]
            reason = f"rank {schedule.placement[partner.stage]} is not at {partner}"
        lines.append(f"  rank {rank} stops at its action {at}, {one}: {reason}")
    return (
        f"schedule {schedule.name} cannot be proven free of deadlock; with sends that "
        "wait for their receive:\n" + "\n".join(lines)
    )
