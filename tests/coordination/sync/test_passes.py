"""Backward passes by step: ranks that run others than their peers are refused."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.protocol.events import Event, PassBegun
from elche.coordination.protocol.instructions import (
    Abort,
    EndEpoch,
    GrantBatches,
    Instruction,
)
from tests.coordination.test_core import opened, plan_of, steps_done, with_run
from tests.harness.reached import reach

STEPS = 12
Script = list[int]
"""How many backward passes a rank runs in each step."""


class Loop:
    """A rank's loop: a pass ends when its peer has begun as many."""

    def __init__(self, rank: int, script: Script) -> None:
        self.rank, self.script = rank, script
        self.grants: deque[GrantBatches] = deque()
        self.step = self.left = self.passes = self.digest = 0
        self.is_inside = False

    def go_on(self, peer: Loop) -> list[Event]:
        """To the next message, or to where it has to wait."""
        while self.grants:
            if not self.is_inside:
                self.is_inside, self.left = True, self.script[self.step]
            if self.passes > peer.passes:
                return []
            if self.left:
                self.left, self.passes = self.left - 1, self.passes + 1
                self.digest = zlib.crc32(str(self.step).encode(), self.digest)
                if self.passes > peer.passes:
                    at = {"step": self.step + 1, "passes": self.passes}
                    return [PassBegun(rank=self.rank, epoch=0, gone=0, **at)]
                continue
            self.is_inside, self.step = False, self.step + 1
            if self.step == self.grants[0].stop:
                grant = self.grants.popleft()
                samples = grant.shares[self.rank] * (grant.stop - grant.start)
                passed = {"backward_passes": self.passes, "pass_steps": self.digest}
                common: Any = {"samples": samples, "busy_s": 0.001, **passed}
                return [steps_done(self.rank, grant.start, grant.stop, **common)]
        return []


def outcome(scripts: list[Script], turns: list[int]) -> Instruction | None:
    """What ends the epoch; None: all wait for ever."""
    core, told = opened(with_run(plan_of("sync"), batch_sizes=((8, STEPS),)))
    loops = [Loop(rank, script) for rank, script in enumerate(scripts)]
    order, idle = deque(turns), 0
    while idle < 2:
        for each in told:
            if isinstance(each, Abort | EndEpoch):
                return each
            if isinstance(each, GrantBatches):
                loops[each.rank].grants.append(each)
        one, peer = loops[order[0]], loops[1 - order[0]]
        order.rotate(1)
        events = one.go_on(peer) or peer.go_on(one)
        idle = 0 if events else idle + 1
        told = [each for event in events for each in core.handle(event, 1.0)]
    return None


SCRIPTS = st.lists(st.integers(0, 2), min_size=STEPS, max_size=STEPS)


@pytest.mark.reaches("as many in all", "more or fewer")
@given(
    SCRIPTS,
    st.tuples(st.integers(0, STEPS - 1), st.integers(0, STEPS - 1), st.booleans()),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)
def test_an_epoch_ends_where_all_run_the_same_passes(
    script: Script, change: tuple[int, int, bool], turns: list[int]
) -> None:
    other, (step, skipped, is_moved) = list(script), change
    other[step] += is_moved
    other[skipped] = max(0, other[skipped] - 1)
    end = outcome([script, other], turns)
    if other == script:
        assert isinstance(end, EndEpoch)
        return
    reach("as many in all" if sum(other) == sum(script) else "more or fewer")
    assert isinstance(end, Abort)
    assert end.kind == "config"
    assert "if elche.any(is_bad): continue" in end.reason
