"""Published schedules in loop placement: GPipe, 1F1B, ZB-H1, ZB-H2, interleaved.

Schedules of one stage per rank differ in two numbers per rank. `warmup` is the number
of forwards before the first backward. `delay` is the number of microbatches by which W
follows I; None is B, unsplit.

Sources: GPipe (Huang et al. 2019), 1F1B (PipeDream-flush, Narayanan et al. 2021), ZB-H1
and ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, figures 2 and 3).
Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021) and its zero-bubble version, as
in torch.distributed.pipelining, whose rounds need not be p microbatches long.
"""

from __future__ import annotations

from elche.errors import ConfigError
from elche.schedule.codes import B, F, I, Rows, W


def gpipe_rows(placement: tuple[int, ...], num_ranks: int, count: int) -> Rows:
    """All forwards, then all backwards, for any placement."""
    rows: Rows = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(placement):
        rows[rank] += [(stage * count + each) * 8 + F for each in range(count)]
    for stage in reversed(range(len(placement))):
        rows[placement[stage]] += [
            (stage * count + each) * 8 + B for each in range(count)
        ]
    return rows


def one_f_one_b_rows(num_ranks: int, count: int) -> Rows:
    """1F1B: rank k holds at most p - k microbatches."""
    return [
        _row(rank, count, warmup=num_ranks - rank, delay=None)
        for rank in range(num_ranks)
    ]


def zb_h1_rows(num_ranks: int, count: int) -> Rows:
    """ZB-H1: 1F1B with W of rank k delayed by k; every rank holds at most p."""
    return [
        _row(rank, count, warmup=num_ranks - rank, delay=rank)
        for rank in range(num_ranks)
    ]


def zb_h2_rows(num_ranks: int, count: int) -> Rows:
    """ZB-H2: rank k begins with 2(p - k) - 1 forwards; every rank holds 2p - 1."""
    return [
        _row(rank, count, warmup=2 * (num_ranks - rank) - 1, delay=2 * rank)
        for rank in range(num_ranks)
    ]


def _row(rank: int, count: int, warmup: int, delay: int | None) -> list[int]:
    """One rank's codes: `warmup` forwards, then alternating backwards and forwards.

    W of a microbatch runs after the I of `delay` later ones. After its last forward a
    rank waits for each I, so one W runs between any two.
    """
    base = rank * count
    warmup = min(warmup, count)
    row = [(base + each) * 8 + F for each in range(warmup)]
    weights = 0
    for each in range(count):
        if delay is None:
            row.append((base + each) * 8 + B)
        else:
            row.append((base + each) * 8 + I)
            if each >= delay or (each + warmup >= count and weights <= each):
                row.append((base + weights) * 8 + W)
                weights += 1
        if warmup + each < count:
            row.append((base + warmup + each) * 8 + F)
    if delay is not None:
        row += [(base + each) * 8 + W for each in range(weights, count)]
    return row


def interleaved_rows(
    num_ranks: int, chunks: int, count: int, zero_bubble: bool = False
) -> Rows:
    """Interleaved 1F1B, or interleaved zero-bubble.

    Args:
        num_ranks: number of ranks.
        chunks: stages per rank.
        count: microbatches; a multiple of the number of rounds, max(1, count // p).
        zero_bubble: split the backward; W starts after the rank's first `rank`
            backwards.

    Raises:
        ConfigError: the microbatches do not divide into rounds.
    """
    rounds = max(1, count // num_ranks)
    if count % rounds:
        raise ConfigError(
            f"interleaved schedules run microbatches in {rounds} equal rounds of at "
            f"least {num_ranks} (the ranks), got {count} microbatches; use a multiple "
            f"of {rounds}, such as {count - count % rounds}"
        )
    length = count // rounds
    rows = []
    for rank in range(num_ranks):
        forwards = _in_rounds(num_ranks, chunks, count, length, rank)
        backwards = _in_rounds(num_ranks, chunks, count, length, rank, reverse=True)
        step = 1 if zero_bubble else 2
        warmup = min(
            (chunks - 1) * length + step * (num_ranks - 1 - rank), len(forwards)
        )
        row = [index * 8 + F for index in forwards[:warmup]]
        weights = 0
        for turn, index in enumerate(backwards):
            if warmup + turn < len(forwards):
                row.append(forwards[warmup + turn] * 8 + F)
            row.append(index * 8 + (I if zero_bubble else B))
            if zero_bubble and turn >= rank:
                row.append(backwards[weights] * 8 + W)
                weights += 1
        if zero_bubble:
            row += [index * 8 + W for index in backwards[weights:]]
        rows.append(row)
    return rows


def _in_rounds(
    num_ranks: int,
    chunks: int,
    count: int,
    length: int,
    rank: int,
    reverse: bool = False,
) -> list[int]:
    """Stage times `count` plus microbatch, in a rank's order of F (or of B).

    Each round of `length` microbatches passes through all of the rank's stages.
    """
    order = reversed(range(chunks)) if reverse else range(chunks)
    local = list(order)
    return [
        (chunk * num_ranks + rank) * count + begin + each
        for begin in range(0, count, length)
        for chunk in local
        for each in range(length)
    ]
