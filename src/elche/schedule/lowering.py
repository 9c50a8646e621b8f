"""Sends and receives for a schedule, and the proof that it cannot deadlock.

Each message between two ranks gets a send right after the computation that makes it,
and a receive on the other rank at the same moment of a simulated run, so before the
computation that the other rank runs then: posted early, waited for where it is needed
(as torch's ``_add_send_recv`` does). Both ranks of a pair list their messages in the
same order, which transports without tags need.

The proof is by the strictest transport: a send that ends only when the other rank has
reached the matching receive, and a receive that ends only with its send. What
completes there completes with any amount of buffering, since buffers only let ranks
run ahead.
"""

from __future__ import annotations

from elche.errors import ConfigError
from elche.schedule.actions import Kind, Schedule, StageAction
from elche.schedule.codes import check_schedule, encode
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.timing import CostTable, run_rows

_UNIT = StageCost(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
_RECEIVE_OF = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
_SEND_OF = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
_FORWARDS = frozenset({Kind.FORWARD})
_BACKWARDS = frozenset({Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD})


def lower(schedule: Schedule, costs: PipelineCosts | None = None) -> Schedule:
    """Adds sends and receives to a compute-only schedule, for any placement.

    Args:
        schedule: compute only.
        costs: place the receives at the expected time; None takes equal times.

    Raises:
        ConfigError: it is lowered already, incomplete, or deadlocks; the offending
            actions are printed.
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
        schedule: with sends and receives.

    Raises:
        ConfigError: messages are missing, or ranks wait for each other; each rank's
            offending action is printed.
    """
    check_schedule(schedule)
    _check_messages(schedule)
    rows = schedule.actions
    positions = [0] * len(rows)
    runnable = list(range(len(rows)))
    done: set[StageAction] = set()
    while runnable:
        rank = runnable.pop()
        row = rows[rank]
        while positions[rank] < len(row):
            one = row[positions[rank]]
            if one.is_compute:
                if not _has_input(one, schedule, done):
                    break
            else:
                partner = _partner(one)
                other = schedule.placement[partner.stage]
                at = positions[other]
                if at == len(rows[other]) or rows[other][at] != partner:
                    break
                if one.kind in _RECEIVE_OF and not _is_made(one, done):
                    break
                if partner.kind in _RECEIVE_OF and not _is_made(partner, done):
                    break
                done.add(partner)
                positions[other] += 1
                runnable.append(other)
            done.add(one)
            positions[rank] += 1
    if any(at < len(row) for at, row in zip(positions, rows, strict=True)):
        raise ConfigError(_stuck(schedule, positions, done))


def _in_order(
    schedule: Schedule, starts: list[list[float]], bursts: list[tuple[int, int]]
) -> list[tuple[int, StageAction]]:
    """Every action with its rank: by start time, and never before what it needs.

    What an action needs never starts after it. Where both start together (actions
    without duration) the order of the simulation decides, which sorting keeps.
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
    """The send and the receive that follow an action; None where there are none."""
    if one.kind is Kind.FORWARD:
        step, send, receive = 1, Kind.SEND_F, Kind.RECV_F
    elif one.kind in _BACKWARDS:
        step, send, receive = -1, Kind.SEND_B, Kind.RECV_B
    else:
        return None
    other = one.stage + step
    if not 0 <= other < len(placement) or placement[other] == placement[one.stage]:
        return None
    return (
        StageAction(one.stage, send, one.microbatch),
        StageAction(other, receive, one.microbatch),
    )


def _partner(one: StageAction) -> StageAction:
    """The receive of a send, the send of a receive."""
    if one.kind in _RECEIVE_OF:
        step = 1 if one.kind is Kind.SEND_F else -1
        return StageAction(one.stage + step, _RECEIVE_OF[one.kind], one.microbatch)
    step = -1 if one.kind is Kind.RECV_F else 1
    return StageAction(one.stage + step, _SEND_OF[one.kind], one.microbatch)


def _is_made(send: StageAction, done: set[StageAction]) -> bool:
    """True if what a send carries has been computed."""
    kinds = _FORWARDS if send.kind is Kind.SEND_F else _BACKWARDS
    return any(StageAction(send.stage, kind, send.microbatch) in done for kind in kinds)


def _has_input(one: StageAction, schedule: Schedule, done: set[StageAction]) -> bool:
    if one.kind is Kind.BACKWARD_WEIGHT:
        return True
    if one.kind is Kind.FORWARD:
        source, receive, kinds = one.stage - 1, Kind.RECV_F, _FORWARDS
    else:
        source, receive, kinds = one.stage + 1, Kind.RECV_B, _BACKWARDS
    if not 0 <= source < schedule.num_stages:
        return True
    if schedule.placement[source] == schedule.placement[one.stage]:
        return any(StageAction(source, kind, one.microbatch) in done for kind in kinds)
    return StageAction(one.stage, receive, one.microbatch) in done


def _check_messages(schedule: Schedule) -> None:
    """Checks that exactly the messages that are needed are there."""
    present = {one for row in schedule.actions for one in row if not one.is_compute}
    needed: set[StageAction] = set()
    for row in schedule.actions:
        for one in row:
            needed.update(_message_after(one, schedule.placement) or ())
    for wrong, verdict in (
        (needed - present, "lacks"),
        (present - needed, "has but does not need"),
    ):
        if wrong:
            shown = ", ".join(map(str, sorted(wrong)[:6]))
            raise ConfigError(
                f"schedule {schedule.name} {verdict} {shown}"
                f"{' and more' if len(wrong) > 6 else ''}"
            )


def _stuck(schedule: Schedule, positions: list[int], done: set[StageAction]) -> str:
    lines = []
    for rank, (row, at) in enumerate(zip(schedule.actions, positions, strict=True)):
        if at == len(row):
            continue
        one = row[at]
        if one.is_compute:
            reason = "its input has not come"
        elif one.kind in _RECEIVE_OF and not _is_made(one, done):
            reason = "what it sends has not been computed"
        else:
            partner = _partner(one)
            reason = f"rank {schedule.placement[partner.stage]} is not at {partner}"
        lines.append(f"  rank {rank} stops at its action {at}, {one}: {reason}")
    return (
        f"schedule {schedule.name} cannot be proven free of deadlock; with sends that "
        "wait for their receive:\n" + "\n".join(lines)
    )
