"""Schedules of two stages per rank in V placement: ZB-V, V-Half, V-Min.

Rank r holds stage r and stage 2p - 1 - r. The first and the last stage are on rank 0,
so the loss needs no second trip.

Sources: ZB-V (Qi et al. 2024, section 6; its order for F = I = W, as in torch's
``ScheduleZBVZeroBubble``) and V-Half, V-Min (Qi et al., Pipeline Parallelism with
Controllable Memory, 2024). V-Half and V-Min repeat a *building block* (F, I and W of
both stages) every six slots. The block's length in slots determines the memory.
"""

from __future__ import annotations

from itertools import product

from elche.schedule.codes import F, I, Rows, W

_SLOTS = 6


def zb_v_rows(num_ranks: int, count: int) -> Rows:
    """ZB-V: at most p microbatches on every rank, no bubble in the middle."""
    last = 2 * num_ranks - 1
    return [
        [
            ((rank, last - rank)[chunk] * count + each) * 8 + kind
            for chunk, kind, each in _zb_v_pattern(num_ranks, rank, max(last, count))
            if each < count
        ]
        for rank in range(num_ranks)
    ]


def _zb_v_pattern(num_ranks: int, rank: int, count: int) -> list[tuple[int, int, int]]:
    """Actions of one rank (chunk, kind, microbatch); `count` is at least 2p - 1."""
    row: list[tuple[int, int, int]] = []
    done = {(chunk, kind): 0 for chunk in (0, 1) for kind in (F, I, W)}

    def add(chunk: int, *kinds: int) -> None:
        for kind in kinds:
            row.append((chunk, kind, done[chunk, kind]))
            done[chunk, kind] += 1

    for _ in range(2 * (num_ranks - rank) - 1):
        add(0, F)
    for _ in range(rank):
        add(1, F)
        add(0, F)
    for _ in range(num_ranks - rank):
        add(1, F, I, W)
    while done[1, F] < count:
        if done[0, F] < count:
            add(0, F)
        add(0, I, W)
        add(1, F, I, W)
    for _ in range(rank):
        add(0, I)
        add(1, I)
    for _ in range(num_ranks - rank):
        add(0, I, W)
    for chunk in (1, 0):
        while done[chunk, W] < count:
            add(chunk, W)
    return row


V_MIN_STEPS = (1, 1, 1, 1)
V_HALF_STEPS = (1, 2, 1, 2)


def block_rows(num_ranks: int, count: int, steps: tuple[int, int, int, int]) -> Rows:
    """Repeats the shortest building block with W in its free slots.

    `steps` has the slots per rank of each of the four passes, such as `V_MIN_STEPS`.
    """
    last = 2 * num_ranks - 1
    rows = []
    for rank, slots in enumerate(_shortest_block(num_ranks, steps)):
        taken = {slot % _SLOTS for slot in slots}
        events = []
        for position, (slot, kind) in enumerate(zip(slots, (F, F, I, I), strict=True)):
            stage = rank if position in (0, 3) else last - rank
            events.append((slot, stage, kind))
            if kind == I:
                free = next(
                    slot + step
                    for step in range(1, 2 * _SLOTS)
                    if (slot + step) % _SLOTS not in taken
                )
                taken.add(free % _SLOTS)
                events.append((free, stage, W))
        codes = _SLOTS * count * num_ranks * 16  # above every code
        row = sorted(
            (slot + _SLOTS * each) * codes + (stage * count + each) * 8 + kind
            for slot, stage, kind in events
            for each in range(count)
        )
        rows.append([key % codes for key in row])
    return rows


def _shortest_block(
    num_ranks: int, steps: tuple[int, int, int, int]
) -> list[tuple[int, int, int, int]]:
    """Slots of F, F, I and I per rank in the shortest block without collisions."""
    down, up, down_back, up_back = steps
    hops = num_ranks - 1
    blocks = []
    for waits in product(range(_SLOTS), repeat=3):
        second_forward = (down + up) * hops + 1 + waits[0]
        second_backward = second_forward + 1 + waits[1]
        first_backward = second_backward + (down_back + up_back) * hops + 1 + waits[2]
        slots = [
            (
                down * rank,
                second_forward - up * rank,
                second_backward + down_back * rank,
                first_backward - up_back * rank,
            )
            for rank in range(num_ranks)
        ]
        if all(len({slot % _SLOTS for slot in each}) == 4 for each in slots):
            blocks.append((sum(waits), first_backward, waits, slots))
    return min(blocks)[3]
