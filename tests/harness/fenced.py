"""Ranks of which some die in a run that goes on without them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.harness.rank_pool import RankPool
from tests.harness.rank_process import Outcome
from tests.harness.serving import serve_in_thread

RUN_WITHIN_S = 100.0


def run_fenced(
    ranks: int, task: Callable[..., Any], *args: Any, joiners: int = 0, **more: Any
) -> tuple[list[Outcome], list[int]]:
    """A case in processes of its own; how each ended, and whom others outlived.

    Args:
        ranks: of the run, and of those that join it.
        task: runs on each of them.
        args: of the task.
        joiners: the last ones, that are to join.
        more: further arguments of the task.
    """
    lost: list[int] = []
    with RankPool(ranks) as pool:

        def fence(rank: int) -> None:
            lost.append(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pool.pids[rank], signal.SIGKILL)

        outcomes = pool.run(
            task,
            *args,
            case_setup=partial(serve_in_thread, fence=fence, joiners=joiners),
            expect_failure=True,
            timeout_s=RUN_WITHIN_S,
            **more,
        )
    return list(outcomes), lost


def survivors_of(
    outcomes: Sequence[Outcome], lost: Sequence[int], victims: Sequence[int]
) -> list[Any]:
    """What those have who live; each of the others was killed, and nobody else failed.

    Args:
        outcomes: of `run_fenced`.
        lost: of it.
        victims: who was to die.
    """
    errors = {each.rank: each.error for each in outcomes if each.error}
    others = [error for rank, error in errors.items() if rank not in victims]
    assert not others, "\n".join(map(str, others))
    assert sorted(lost) == sorted(victims), "a fault did not happen"
    for rank in victims:
        assert errors[rank].way == "died"
        assert "-9" in errors[rank].text
    return [each.value for each in outcomes if each.rank not in victims]
