"""Deadlines of cases in which somebody stays away: long until then, short afterwards.

A rank may be kept from running for many seconds by what else a machine does. So the
ranks of a case meet with a deadline of a minute, and wait for a short time only once
all have come through what they do together.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from elche.comm.transport.process_group import Group
from tests.harness.rank_main import this_place
from tests.harness.waiting import until

MEETS_WITHIN_S = 100.0


def all_here(folder: str, name: str = "here") -> None:
    """Returns when every rank of the case is here.

    Over files: a rank that gives up may end the group's connections before another one
    has taken the last message from them.

    Args:
        folder: the same on every rank, and of this case alone.
        name: tells meetings of one case apart.
    """
    place = this_place()
    Path(folder, f"{name}-{place.rank}").touch()
    others = [Path(folder, f"{name}-{rank}") for rank in range(place.world_size)]
    until(lambda: all(other.exists() for other in others), MEETS_WITHIN_S)


def lose_patience(group: Group | None, timeout_s: float) -> None:
    """From here on this rank waits so long: all have come, somebody will not again."""
    assert group is not None
    group.timeout_s = timeout_s
    allowed = timedelta(seconds=timeout_s)
    options: Any = getattr(group, "_options", None)
    if options is None:
        made: Any = group._process_group
        made._set_default_timeout(allowed)
    else:  # of torch's groups, which every collective is given
        options.timeout = allowed
