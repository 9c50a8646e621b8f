"""The ranks of a host leave a run, or are lost at once, at any moment. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.coordination.protocol.events import HostLeaves, HostLost, JoinReady
from elche.coordination.protocol.instructions import Abort, Regroup
from elche.coordination.state import Coordinator
from elche.sim.rank import join_of
from tests.coordination.test_joining import BATCHES, Meeting, plan_of

HOST = (1, 2)
LEAVES = HostLeaves(ranks=HOST, by="SIGTERM on host 1")
LOST = HostLost(ranks=HOST, why="the launcher of host 1 has ended")


def lose_host(meeting: Meeting) -> None:
    for rank in HOST:
        meeting.members.pop(rank, None)
    meeting.say(LOST)


def test_ranks_leave_where_the_epoch_is_cut_and_nothing_is_done_twice() -> None:
    meeting = Meeting(plan_of(founders=3))
    everybody = list(meeting.members.values())
    for rank in (0, 1, 2, 1):
        meeting.move(rank)
    meeting.say(LEAVES)
    meeting.finish()
    assert meeting.core.aborted is None
    assert not meeting.core.lost
    assert sum(len(member.batches) for member in everybody) == BATCHES
    for rank in HOST:
        (told,) = (x for x in meeting.told[rank] if isinstance(x, Abort))
        assert "was sent SIGTERM on host 1, and the others go on" in told.reason
        assert told.exit_code == 0
    regroups = [told for told in meeting.told[0] if isinstance(told, Regroup)]
    assert [(told.left, told.in_order) for told in regroups] == [
        ((1,), True),
        ((2,), True),
    ]


def test_a_host_is_lost_at_once() -> None:
    meeting = Meeting(plan_of(founders=3))
    meeting.move(1)
    lose_host(meeting)
    assert meeting.core.lost == set(HOST)
    meeting.finish()
    assert meeting.core.aborted is None


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (LOST, "rank 1 failed: the launcher of host 1 has ended"),
        (LEAVES, "interrupted: the launcher was sent SIGTERM on host 1"),
        (HostLeaves(ranks=(0, 1, 2), by="SIGINT"), "the launcher was sent SIGINT"),
    ],
)
def test_a_run_that_cannot_go_on_ends(event: HostLost | HostLeaves, says: str) -> None:
    meeting = Meeting(plan_of(founders=3, survive=len(event.ranks) == 3))
    meeting.say(event)
    assert meeting.core.aborted is not None
    assert says in meeting.core.aborted


ACTS = st.lists(
    st.sampled_from([0, 1, 2, 3, "leave", "lost", "die", "come", "ready"]), max_size=80
)


@settings(max_examples=150, deadline=None)
@given(acts=ACTS)
def test_a_host_goes_at_any_moment(acts: list[int | str]) -> None:
    """By either way, while one of its ranks dies, and another rank joins."""
    meeting = Meeting(plan_of(founders=3))
    for act in acts:
        if isinstance(act, int):
            meeting.move(act)
        elif act == "die":
            if 1 in meeting.members and meeting.core.outlives(1):
                meeting.lose(1)
        elif act in ("come", "ready"):
            if act == "come" and 3 not in meeting.members:
                meeting.come(3)
            elif act == "ready" and 3 in meeting.members:
                waits = not meeting.members[3].starts and not meeting.members[3].is_in
                if waits and not meeting.members[3].refused:
                    meeting.say(JoinReady(rank=3))
        elif meeting.core.outlives(*HOST) and not meeting.core.is_finished:
            if act == "leave":
                meeting.say(LEAVES)
            else:
                lose_host(meeting)
    meeting.finish()
    assert meeting.core.aborted is None


@pytest.mark.parametrize(
    ("several_hosts", "kind", "says"),
    [
        (True, "auto", "before the first epoch has begun"),
        (False, "auto", "policy='sync' over NCCL"),
        (True, "nccl", "transport.kind='nccl'"),
    ],
)
def test_gpus_of_several_hosts_sum_by_nccl_where_that_is_asked_for(
    several_hosts: bool, kind: str, says: str
) -> None:
    plan = plan_of("sync", founders=3, transport=kind)
    core = Coordinator(3, survives=True, several_hosts=several_hosts)
    for rank in range(3):
        join = join_of(plan, rank, plan.devices[0])
        core.handle(replace(join, device="NVIDIA A100"), 0.0)
    core.handle(LOST, 1.0)
    assert core.aborted is not None
    assert says in core.aborted
