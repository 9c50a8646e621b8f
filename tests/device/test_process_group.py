"""The test device's process group: gloo's results, and NCCL's contract."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from elche.ddp.group import as_group
from tests import device as test_device
from tests.comm.joined import STORE, meeting
from tests.device import build
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

WAIT_S = 120.0
LATE_S = 1.0
"""Deadline of collectives to which a rank does not come."""
STAYS = [{"TEST_DEVICE_ENDS_LATE": "0"}] * 2


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Builds the device before ranks with deadlines need it."""
    if test_device.KIND != test_device.NAME:
        pytest.skip("the errors of another device's process group are its own")
    if tool := build.missing_compiler():
        pytest.skip(f"the test device needs {tool} to be built")
    build.built()


@contextmanager
def torch_group(timeout_s: float = WAIT_S) -> Iterator[dist.FileStore]:
    """Torch's default group on this rank: gloo, and the device's own backend."""
    place = this_place()
    test_device.register()
    torch.accelerator.set_device_index(place.rank)
    path = os.path.join(os.environ[STORE], "store")
    store = dist.FileStore(path, place.world_size)
    dist.init_process_group(
        f"cpu:gloo,{test_device.NAME}:{test_device.BACKEND}",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    store.set_timeout(timedelta(seconds=WAIT_S))
    try:
        yield store
    finally:
        test_device.set_delays("none")
        own_backend().abort()
        dist.destroy_process_group()


def own_backend() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device(test_device.NAME))


def begin(tensor: torch.Tensor, **options: Any) -> Any:
    work = dist.all_reduce(tensor, async_op=True, **options)
    assert work is not None
    return work


def here(*size: int, value: float = 1.0) -> torch.Tensor:
    """A tensor on this rank's device, computed already."""
    made = torch.full(size, value, device=test_device.NAME)
    torch.accelerator.synchronize()
    return made


def results(kind: str) -> list[torch.Tensor]:
    """What collectives of tensors drawn per rank return, on a kind of device."""
    generator = torch.Generator().manual_seed(this_place().rank)
    found = []
    for numel in (1, 1000, 100_003):
        drawn = torch.randn(numel, generator=generator)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            each = (3 * drawn).to(dtype).to(kind)
            dist.all_reduce(each)
            found.append(each)
        each = drawn.to(kind, copy=True)
        dist.broadcast(each, 1)
        parts = [torch.empty_like(each) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, drawn.to(kind))
        row = torch.empty(numel * dist.get_world_size(), device=kind)
        dist.all_gather_into_tensor(row, drawn.to(kind))
        message = drawn.to(kind, copy=True)
        if dist.get_rank() == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            kept = message.clone()
            dist.recv(message, 0)
            dist.send(kept, 0)
        found += [each, *parts, row, message]
    return [each.cpu() for each in found]


def differ_from_gloo() -> list[int]:
    with torch_group():
        expected = results("cpu")
        test_device.set_delays("random", 300, seed=1 + this_place().rank)
        found = results(test_device.NAME)
        dist.barrier()
        pairs = enumerate(zip(found, expected, strict=True))
        return [place for place, (a, b) in pairs if not torch.equal(a, b)]


def test_results_equal_gloo_s_bit_for_bit(ranks2: RankPool) -> None:
    assert ranks2.run(differ_from_gloo, case_setup=meeting) == [[], []]


def host_does_not_wait() -> list[float]:
    """Rank 1 comes only after rank 0's host has passed the collective and its wait."""
    with torch_group() as store:
        summed = here(100_000)
        dist.all_reduce(here(1))  # makes the communicator, which blocks
        if dist.get_rank() == 1:
            store.get("passed")
        work = begin(summed)
        before = summed[:1].clone()  # nothing orders it behind the sum
        if dist.get_rank() == 0:
            assert not work.is_completed()
            stale = before.item()
        work.wait()
        after = summed[-1:].clone()
        if dist.get_rank() == 1:
            return [after.item()]
        assert not work.is_completed()
        store.set("passed", "")
        return [stale, after.item()]


def test_the_host_returns_at_once_and_only_wait_orders(ranks2: RankPool) -> None:
    found = ranks2.run(host_does_not_wait, case_setup=meeting)
    assert found == [[1.0, 2.0], [2.0]]


def ends_alone(end: Callable[[dist.Work], None], timeout_s: float) -> list[str]:
    """Errors of a collective that rank 1 never joins, of its wait and of the next."""
    with torch_group(timeout_s) as store:
        dist.all_reduce(here(1))
        if dist.get_rank() == 1:
            store.get("seen")
            return []
        work = begin(here(10))
        errors = []
        for call in (lambda: end(work), work.wait, lambda: begin(here(10))):
            try:
                call()
            except dist.DistBackendError as error:
                errors.append(str(error).splitlines()[0])
        torch.accelerator.synchronize()  # the stream is free again
        assert work.is_completed()
        store.set("seen", "")
        return errors


def abort(work: dist.Work) -> None:
    assert not work.is_completed()
    own_backend().abort()
    with pytest.raises(dist.DistBackendError, match="aborted: ALLREDUCE 1 of 40"):
        work.wait(timedelta(seconds=WAIT_S))


def wait_long(work: dist.Work) -> None:
    work.wait(timedelta(seconds=WAIT_S))


def test_abort_ends_pending_collectives_and_the_group(ranks2: RankPool) -> None:
    first, _ = ranks2.run(ends_alone, abort, WAIT_S, case_setup=meeting, env=STAYS)
    assert [each[:7] for each in first] == ["aborted", "tdccl w"]


def test_a_late_collective_ends_the_process_as_under_nccl(ranks2: RankPool) -> None:
    one, _ = ranks2.run(
        ends_alone, wait_long, LATE_S, case_setup=meeting, expect_failure=True,
        timeout_s=30.0,
    )  # fmt: skip
    assert one.error is not None
    assert one.error.way == "died"
    assert one.error.text == f"exit code {-signal.SIGABRT}"
    assert "tdccl timed out: ALLREDUCE 1 of 40 bytes" in one.error.log


def uses_two_groups() -> list[str]:
    """Sums in two groups, on rank 1 in the other order."""
    with torch_group() as store:
        late = timedelta(seconds=LATE_S)
        groups = [dist.new_group(timeout=late) for _ in range(2)]
        for group in groups:  # makes their communicators
            begin(here(1), group=group).wait(timedelta(seconds=WAIT_S))
        place = dist.get_rank()
        works = []
        for group in reversed(groups) if place else groups:
            works.append(begin(here(10), group=group))
            store.set(f"begun {place}", "")
            store.get(f"begun {1 - place}")
        errors = []
        for work in works:
            try:
                work.wait(timedelta(seconds=WAIT_S))
            except dist.DistBackendError as error:
                errors.append(str(error).splitlines()[0])
        store.set(f"done {place}", "")
        store.get(f"done {1 - place}")
        return errors


def test_groups_used_in_different_orders_hang_and_are_named(ranks2: RankPool) -> None:
    """As a device runs one collective at a time."""
    found = ranks2.run(uses_two_groups, case_setup=meeting, env=STAYS)
    # The rank that gives up first frees its device for the other's collective.
    errors = [each for of_rank in found for each in of_rank]
    assert errors
    assert all("do all ranks use their groups in the same order?" in e for e in errors)


def waits_for_a_late_rank() -> float:
    """Rank 1 comes when rank 0 has looked after it, later than a poll of gloo."""
    with torch_group() as store:
        group = as_group(None, WAIT_S)
        group.check = lambda: store.set("looked", "")
        summed = here(10)
        dist.all_reduce(here(1))
        if dist.get_rank() == 1:
            store.get("looked")
        group.all_reduce(summed, "a late sum")
        return summed.sum().item()


def test_elche_leaves_a_group_alone_whose_rank_is_late(ranks2: RankPool) -> None:
    # Polled as gloo, by waits with a timeout, NCCL's group was aborted after 50 ms.
    assert ranks2.run(waits_for_a_late_rank, case_setup=meeting) == [20.0] * 2
