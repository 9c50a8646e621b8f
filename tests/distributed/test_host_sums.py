"""Sums of ranks on several hosts: by which way, and who may be left out of them.

`test_one_process.py` compares what is trained with one process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

import elche
from elche.comm.transport.exchange import GlooExchange
from elche.comm.transport.host_exchange import HostExchange
from elche.comm.transport.process_group import Group
from elche.runtime.process import rank_groups
from elche.runtime.windows.synchroniser import warn_of_codec
from elche.session.process import current_run
from tests.distributed.cases.tasks import Task, Trace, begin, error_of, shared
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

CAP_MB = 0.0002
"""Several buckets in a small model."""


def of(hosts: str) -> list[dict[str, str]]:
    """One letter per rank."""
    return [{"ELCHE_HOST": name} for name in hosts]


def by_hosts(task: Task) -> tuple[Trace, set[str]]:
    """The task on this rank, and how its gradients were summed."""
    kinds: set[str] = set()

    def look() -> None:
        run = current_run()
        assert run is not None
        sync = run._synchroniser
        if sync.reducer is not None:
            buckets = sync.reducer.buckets
            assert len(buckets) > 1
            kinds.update(type(bucket.exchange).__name__ for bucket in buckets)
        else:
            windows: Any = sync.windows
            if hasattr(windows, "_groups"):
                sums = [each.exchange for each in windows._groups]
            else:
                sums = [windows._window._message]
            kinds.update(type(each).__name__ for each in sums)

    return shared(task, look), kinds


def task_of(**more: Any) -> Task:
    options = {"bucket_cap_mb": CAP_MB, **more.pop("options", {})}
    return Task(dtype="float64", options=options, **more)


def with_another_processor(task: Task) -> tuple[Trace, set[str]]:
    """The last rank's is one on which memory is not shared."""
    before = rank_groups.may_share_memory
    if this_place().rank == 2:
        rank_groups.may_share_memory = lambda: False
    try:
        return by_hosts(task)
    finally:
        rank_groups.may_share_memory = before


@pytest.mark.parametrize(
    ("case", "hosts"), [(by_hosts, "abc"), (with_another_processor, "aab")]
)
def test_all_sum_by_gloo_where_a_host_is_of_one_rank_or_of_another_processor(
    ranks3: RankPool, case: Callable[[Task], Any], hosts: str
) -> None:
    found = ranks3.serve(case, task_of(), env=of(hosts))
    assert {kind for _, kinds in found for kind in kinds} == {GlooExchange.__name__}


def without_each_in_turn(task: Task) -> list[int]:
    """Open files of this rank after each of some steps from which one is left out."""

    begin(task, policy="sync", **task.options)
    run = current_run()
    assert run is not None
    worker, sync, found = run.worker, run._synchroniser, []
    for number in range(1, 13):
        group = worker.groups.without((2 + number % 2,), number)
        sync.share_with(group)
        if group is not None:
            assert sync.reducer is not None
            buckets = sync.reducer.buckets
            for bucket in buckets:
                bucket.send(1.0)
            for bucket in buckets:
                bucket.finish()
                assert isinstance(bucket.exchange, HostExchange)
        elche.barrier()
        found.append(len(os.listdir("/proc/self/fd")))
    elche.shutdown()
    return found


def test_now_this_rank_and_now_that_is_left_out(ranks4: RankPool) -> None:
    """Whoever was in a group that the others have ended begins another with them."""
    found = ranks4.serve(without_each_in_turn, task_of(), env=of("aabb"))
    for files in found:  # a group left open is several files, eight times
        assert sum(files[-2:]) < sum(files[2:4]) + 5, files


def test_nccl_is_refused_where_a_rank_has_no_device_for_it(ranks2: RankPool) -> None:
    task = task_of(options={"transport": "nccl"})
    for said in ranks2.serve(error_of, shared, task, env=of("ab")):
        assert re.search("needs a device of its own on every rank.*, got CPU", said)


@pytest.mark.parametrize(("hosts", "warns"), [("a", True), ("ab", False)])
def test_a_codec_is_warned_of_on_one_host_alone(
    hosts: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group.alone(1.0)
    group.shares_host, group._hosts = True, tuple(hosts)
    warn_of_codec(group, "int8")
    assert ("codec 'int8' costs time and saves none" in caplog.text) == warns
