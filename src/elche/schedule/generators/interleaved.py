"""Interleaved schedules: v stages per rank, stage s on rank s mod p.

Sources: interleaved 1F1B (Narayanan et al., Megatron-LM, 2021) and its zero-bubble
version, both in the form of torch.distributed.pipelining (``ScheduleInterleaved1F1B``,
``ScheduleInterleavedZeroBubble``), whose rounds need not be p microbatches long.
"""

from __future__ import annotations

from elche.errors import ConfigError
from elche.schedule.codes import B, F, I, Rows, W


def interleaved_rows(
    num_ranks: int, chunks: int, count: int, zero_bubble: bool = False
) -> Rows:
    """Interleaved 1F1B, or interleaved zero-bubble.

    Args:
        num_ranks: ranks.
        chunks: stages per rank.
        count: microbatches; a multiple of the number of rounds, max(1, count // p).
        zero_bubble: split the backward, and let W follow once the rank is past its
            first `rank` backwards.

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
