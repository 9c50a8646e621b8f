"""Gradients of ranks on several hosts are those of one process, summed by hosts."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import pytest
import torch

import elche
from elche.comm.transport.exchange import GlooExchange
from elche.comm.transport.host_exchange import HostExchange
from elche.comm.transport.process_group import Group
from elche.errors import ConfigError
from elche.runtime.process import rank_groups
from elche.runtime.windows.synchroniser import warn_of_codec
from elche.session.process import current_run
from tests.distributed.cases.tasks import (
    Task,
    Trace,
    begin,
    difference,
    identical,
    plain,
    positions,
    shared,
)
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

CAP_MB = 0.0005
"""Several buckets in a small model."""


def of(hosts: str, speeds: str = "") -> list[dict[str, str]]:
    """One letter per rank."""
    each = [{"ELCHE_HOST": name} for name in hosts]
    for environment, speed in zip(each, speeds.split(), strict=False):
        environment |= {"ELCHE_SPEED": speed, "ELCHE_MS_PER_SAMPLE": "0.2"}
    return each


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


def trained(pool: RankPool, task: Task, env: list[dict[str, str]]) -> list[Trace]:
    """The task over hosts: equal ranks, every sample once."""
    found = pool.serve(by_hosts, task, env=env)
    traces = [trace for trace, _ in found]
    assert {kind for _, kinds in found for kind in kinds} == {HostExchange.__name__}
    assert identical([trace.state for trace in traces])
    for epoch in range(task.epochs):
        assert positions(traces, epoch) == list(range(task.samples))
    return traces


def task_of(**more: Any) -> Task:
    options = {"bucket_cap_mb": CAP_MB, **more.pop("options", {})}
    return Task(dtype="float64", options=options, **more)


def reference_of(task: Task) -> Trace:
    return plain(dataclasses.replace(task, options={}))


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abba"])
@pytest.mark.every(2)
def test_four_ranks_train_as_one_process(ranks4: RankPool, hosts: str) -> None:
    task = task_of(optimizer="adamw", batch_size=18)
    found = trained(ranks4, task, of(hosts, "1 0.25 0.5 1"))
    assert difference(found[0].state, reference_of(task).state) <= 1e-12


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": "adamw"},
        {"model": "unused"},
        {"loop": "accumulate", "samples": 96},
        {"loop": "clip"},
        {"loop": "scaler", "options": {"deterministic": True}},
        {"samples": 98, "batch_size": 16},  # a tail of two samples for three ranks
        {"model": "tied", "weighs": True, "options": {"deterministic": True}},
    ],
    ids=str,
)
@pytest.mark.every(2)
def test_loops_of_two_hosts_train_as_one_process(
    ranks3: RankPool, more: dict[str, Any]
) -> None:
    task = task_of(**more)
    found = trained(ranks3, task, of("aab"))
    if task.weighs or task.loop == "scaler":
        # Weighed otherwise, and steps skipped: as without hosts.
        flat = ranks3.serve(shared, task, env=of("abc"))
        assert difference(found[0].state, flat[0].state) <= 1e-12
    else:
        assert difference(found[0].state, reference_of(task).state) <= 1e-12


def test_non_finite_gradients_are_seen_on_all_hosts(ranks3: RankPool) -> None:
    found = ranks3.serve(infinite, task_of(), env=of("aab"))
    assert found == [[True, False]] * 3


def infinite(task: Task) -> list[bool]:
    """Whether gradients are finite without, and with, an infinite one on one rank."""

    model, optimizer, loader = begin(task, policy="sync", **task.options)
    found = []
    for number, (x, y, _, _) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        is_bad = number == 1 and elche.rank() == 2
        (loss * (float("inf") if is_bad else 1.0)).backward()
        found.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
        optimizer.zero_grad()  # and no step
        if number == 1:
            break
    elche.shutdown()
    return found


def test_windows_of_gradients_are_summed_by_hosts(ranks4: RankPool) -> None:
    options = {"policy": "cadence", "update": "gradients"}
    task = task_of(options=options, samples=160)
    trained(ranks4, task, of("aabb"))


def test_averages_of_windows_are_summed_by_hosts(ranks4: RankPool) -> None:
    options = {"policy": "cadence", "deterministic": True}
    task = task_of(options=options, samples=160)
    found = trained(ranks4, task, of("aabb"))
    flat = ranks4.serve(shared, task, env=of("abcd"))
    assert difference(found[0].state, flat[0].state) <= 1e-12


def test_hosts_of_one_rank_each_sum_by_gloo(ranks3: RankPool) -> None:
    task = task_of()
    found = ranks3.serve(by_hosts, task, env=of("abc"))
    assert {kind for _, kinds in found for kind in kinds} == {GlooExchange.__name__}


def with_another_processor(task: Task) -> tuple[Trace, set[str]]:
    """The last rank's is one on which memory is not shared."""
    before = rank_groups.may_share_memory
    if this_place().rank == 2:
        rank_groups.may_share_memory = lambda: False
    try:
        return by_hosts(task)
    finally:
        rank_groups.may_share_memory = before


def test_all_sum_by_gloo_beside_a_host_of_another_processor(ranks3: RankPool) -> None:
    task = task_of()
    env = of("aab")
    found = ranks3.serve(with_another_processor, task, env=env)
    assert {kind for _, kinds in found for kind in kinds} == {GlooExchange.__name__}
    assert difference(found[0][0].state, reference_of(task).state) <= 1e-12


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
                bucket.send(0, 1.0)
            for bucket in buckets:
                bucket.finish(0)
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


def without_devices(task: Task) -> str:
    try:
        return str(shared(task).state)
    except ConfigError as error:
        return str(error)


def test_nccl_is_refused_where_a_rank_has_no_device_for_it(ranks2: RankPool) -> None:
    task = task_of(options={"transport": "nccl"})
    found = ranks2.serve(without_devices, task, env=of("ab"))
    for said in found:
        assert re.search("needs a device of its own on every rank.*, got CPU", said)


@pytest.mark.parametrize(("hosts", "warns"), [("a", True), ("ab", False)])
def test_a_codec_is_warned_of_on_one_host_alone(
    hosts: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group.alone(1.0)
    group.shares_host, group._hosts = True, tuple(hosts)
    warn_of_codec(group, "int8")
    assert ("codec 'int8' costs time and saves none" in caplog.text) == warns
