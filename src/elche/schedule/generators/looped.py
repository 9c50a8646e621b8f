"""Published schedules in loop placement: GPipe, 1F1B, ZB-H1, ZB-H2, interleaved.

All but GPipe are one rule with three numbers per rank. `warmup` is the number of
forwards before the first backward. `delay` is the number of backwards between an I and
its W; None means an unsplit B. Forwards, and backwards, cycle through the rank's stages
in rounds.

Sources: GPipe (Huang et al. 2019), 1F1B (PipeDream-flush, Narayanan et al. 2021), ZB-H1
and ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, figures 2 and 3).
Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021) and its zero-bubble version, as
in torch.distributed.pipelining, whose rounds need not be p microbatches long.
"""

from __future__ import annotations

from elche.errors import ConfigError
from elche.schedule.codes import B, F, I, Rows, W

ONE_STAGE = ("1f1b", "zb-h1", "zb-h2")
LOOPED = ("interleaved-1f1b", "interleaved-zb")

_STEPS = {"1f1b": 1, "zb-h1": 1, "zb-h2": 2, "interleaved-1f1b": 2, "interleaved-zb": 1}
"""Number of warm-up forwards that a rank runs more than the next rank."""
_DELAYS = {"zb-h1": 1, "zb-h2": 2, "interleaved-zb": 1}
"""Number of backwards before the first W, to be multiplied by the rank's index."""


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


def looped_rows(name: str, num_ranks: int, chunks: int, count: int) -> Rows:
    """Codes of 1F1B, or of a schedule derived from it."""
    rounds = max(1, count // num_ranks) if name in LOOPED else 1
    if count % rounds:
        raise ConfigError(
            f"interleaved schedules run microbatches in {rounds} equal rounds of at "
            f"least {num_ranks} (the ranks), got {count} microbatches; use a multiple "
            f"of {rounds}, such as {count - count % rounds}"
        )
    length = count // rounds
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = (
            [
                (chunk * num_ranks + rank) * count + begin + each
                for begin in range(0, count, length)
                for chunk in order
                for each in range(length)
            ]
            for order in (range(chunks), range(chunks)[::-1])
        )
        warmup = (chunks - 1) * length + _STEPS[name] * (num_ranks - 1 - rank) + 1
        delay = _DELAYS[name] * rank if name in _DELAYS else None
        rows.append(_row(forwards, backwards, warmup, delay, name in ONE_STAGE))
    return rows


def _row(
    forwards: list[int],
    backwards: list[int],
    warmup: int,
    delay: int | None,
    fills_waits: bool,
) -> list[int]:
    """One rank's codes: `warmup` forwards, then alternating backwards and forwards.

    `forwards` lists each F, and `backwards` each I or B, as stage * `count` +
    microbatch. With `fills_waits` one W runs between any two I after the last forward,
    where a rank waits for each I.
    """
    row = [index * 8 + F for index in forwards[:warmup]]
    weights = [] if delay is None else [index * 8 + W for index in backwards]
    for turn, index in enumerate(backwards):
        row.append(index * 8 + (B if delay is None else I))
        is_waiting = fills_waits and turn + warmup >= len(forwards)
        is_behind = len(backwards) - len(weights) <= turn
        if delay is not None and (turn >= delay or (is_waiting and is_behind)):
            row.append(weights.pop(0))
        row += [one * 8 + F for one in forwards[warmup + turn : warmup + turn + 1]]
    return row + weights
