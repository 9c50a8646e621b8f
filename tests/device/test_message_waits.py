"""Tensors between devices of one process: messages, and averages of parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import distributed as dist

from elche.comm.averaging.averaging import ParameterAverager
from elche.comm.averaging.overlap import OverlappedAverager
from elche.comm.transport.device_group import DeviceGroup, sum_of_ranks
from elche.comm.transport.device_messages import (
    DeviceMessages,
    SideStream,
    trial,
)
from elche.comm.transport.messages import Address, Message
from elche.devices.backends import form_group
from elche.errors import CommunicationError
from tests.comm.averaging.test_averaging import Net, close, copied, plan_for, train
from tests.comm.thread_group import on_ranks
from tests.comm.transport.thread_link import transports
from tests.device import KIND, NAME, held

TIMEOUT_S = 60.0
DEADLINE = timedelta(seconds=TIMEOUT_S)
ELEMENTS = 10_000
WHAT = "a message"
TO, FROM = Address(1, 1, WHAT), Address(0, 1, WHAT)
T = TypeVar("T")
DEVICES = [f"{NAME}:0", f"{NAME}:1"]
pytestmark = pytest.mark.skipif(
    KIND != NAME, reason="only the test device has its backend"
)


@pytest.fixture(autouse=True)
def no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late transfer fails; it does not end the process."""
    monkeypatch.setenv("TEST_DEVICE_ENDS_LATE", "0")


def meeting() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(DEADLINE)
    return store


def on_both(act: Callable[[int], T]) -> list[T]:
    """Results of both ranks, which are threads."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(act, range(2)))


def until(is_over: Callable[[], bool], what: str = WHAT) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not is_over():
        assert time.monotonic() < until_s, what
        time.sleep(0.001)


@pytest.fixture
def ends(device: torch.device) -> Iterator[list[Any]]:
    """Transports of two ranks, whose devices are connected by their own backend."""
    store = meeting()

    def messages(rank: int) -> DeviceMessages:
        place = torch.device(DEVICES[rank])
        made = form_group(place, store, rank, 2, DEADLINE)
        partners = frozenset({1 - rank})
        here: Any = SimpleNamespace(rank=rank)
        assert not trial(partners)(made, here, place)  # it connects the ranks
        return DeviceMessages(made, rank, partners, place, SideStream(place))

    made = transports(2, is_connected=False)
    devices = on_both(messages)
    for end, each in zip(made, devices, strict=True):
        end.connect({}, each)
    yield made
    for end in made:
        end.close()
    for each in devices:
        each.made.abort()


def test_threads_enter_one_side_stream(device: torch.device) -> None:
    side, meet = SideStream(device), Barrier(2, timeout=TIMEOUT_S).wait

    def enter(rank: int) -> int:
        torch.accelerator.set_device_index(rank)
        if rank == 1:  # the first to enter is the first to leave
            meet()
        with side.beside():
            meet()
            meet()
        if rank == 0:
            meet()
        return torch.accelerator.current_device_index()

    assert on_both(enter) == [0, 1]


@pytest.mark.usefixtures("delayed")
def test_messages_are_whole(ends: list[Any]) -> None:
    """Each is sent before it is computed, and dropped before it is read."""
    first, second = ends
    found = []
    for number in range(8):
        values = torch.full((ELEMENTS,), number + 1.0, device=DEVICES[0])
        for _ in range(4):
            values = values * 2
        first.send(TO, Message((values,)), TIMEOUT_S)
        (values,) = second.receive(FROM, TIMEOUT_S).tensors
        for _ in range(4):
            values = values * 2
        found.append(values.sum())
        del values
    assert [float(each) / ELEMENTS / 256 for each in found] == [*range(1, 9)]


def test_messages_pass_beside_the_computation(ends: list[Any]) -> None:
    first, second = ends
    values = torch.ones(ELEMENTS, device=DEVICES[0])
    torch.accelerator.synchronize(0)
    side = torch.Stream(DEVICES[0])
    computing = [torch.accelerator.current_stream(each) for each in DEVICES]
    with held(computing[0]), held(computing[1]):
        with side:  # where the message is computed
            first.send(TO, Message((values,)), TIMEOUT_S)
        (found,) = second.receive(FROM, TIMEOUT_S).tensors
    assert float(found.sum()) == ELEMENTS


def test_memory_of_messages_is_freed(ends: list[Any]) -> None:
    first, second = ends
    before = [torch.accelerator.memory_allocated(each) for each in DEVICES]
    first.send(TO, Message((torch.ones(ELEMENTS, device=DEVICES[0]),)), TIMEOUT_S)
    second.receive(FROM, TIMEOUT_S)
    until(
        lambda: [torch.accelerator.memory_allocated(each) for each in DEVICES] == before
    )


def test_transfers_that_fail_raise(ends: list[Any]) -> None:
    devices = ends[1].devices
    _, works = devices.receive([torch.ones(3)], 0)
    devices.made.abort()
    until(lambda: all(each.is_completed() for each in works))
    with pytest.raises(RuntimeError, match="aborted"):
        devices.finish(works)


def test_trial_raises_what_a_send_does() -> None:
    def wait() -> None:
        raise RuntimeError("not sent")

    way = SimpleNamespace(send=lambda *_: SimpleNamespace(wait=wait))
    here: Any = SimpleNamespace(rank=0)
    with pytest.raises(RuntimeError, match="not sent"):
        trial({1})(way, here, torch.device("cpu"))


@pytest.mark.usefixtures("delayed")
def test_sums_are_complete_or_raise() -> None:
    store = meeting()

    def form(rank: int) -> DeviceGroup:
        place = torch.device(DEVICES[rank])
        made = form_group(place, store, rank, 2, DEADLINE)
        here: Any = SimpleNamespace(rank=rank, world_size=2, wait_until=until)
        assert not sum_of_ranks(made, here, place)
        return DeviceGroup(made, here, None, NAME)

    groups = on_both(form)
    alone = groups[0].all_reduce_async(torch.ones(3, device=DEVICES[0]))
    groups[0].made.abort()
    with pytest.raises(CommunicationError, match="aborted"):
        alone.wait()
    for each in groups:
        each.close()


def averaged(kind: Any, devices: list[str]) -> list[dict[str, torch.Tensor]]:
    """The model of each rank after three windows of unlike steps."""

    def run(group: Any, model: Net) -> dict[str, torch.Tensor]:
        rank = group.rank
        averager = kind(list(model.parameters()), model, list, group)
        averager.build()
        for window in range(3):
            train(model, rank, window, steps=rank + 1)
            plan = plan_for(rank, (1, 2), window)
            if kind is ParameterAverager:
                close(group)
                averager.reduce(plan)
                continue
            averager.snapshot(rank + 1.0)
            train(model, rank, window + 10)
            averager.begin(plan)
            train(model, rank, window + 20)
            averager.finish(plan)
        return {name: value.cpu() for name, value in copied(model).items()}

    return on_ranks(2, run, [Net().to(each) for each in devices])


@pytest.mark.usefixtures("delayed")
@pytest.mark.parametrize("kind", [ParameterAverager, OverlappedAverager])
def test_averages_equal_those_of_cpus(kind: Any) -> None:
    expected = averaged(kind, ["cpu", "cpu"])
    for devices in (DEVICES, [DEVICES[0], "cpu"]):
        for one, other in zip(averaged(kind, devices), expected, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), (devices, name)
