"""Which ranks sum on their devices, how that is tried, and the way of a message.

Another backend stands in NCCL's place, and the CPU in the devices'.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist

from elche.comm.transport import device_group
from elche.comm.transport.device_group import (
    DeviceGroupConfig,
    DeviceWork,
    open_device_group,
    serves,
)
from elche.comm.transport.process_group import Group, gather_texts
from elche.errors import CommunicationError, ConfigError
from tests.comm.joined import joined, meeting
from tests.harness.logged import logged
from tests.harness.rank_pool import RankPool

CPU = torch.device("cpu")
LISTEN = "127.0.0.1"


@pytest.mark.parametrize(
    ("places", "serving", "between"),
    [
        ([], False, False),
        ([("a", "gpu 1")], False, False),
        ([("a", "gpu 1"), ("a", "gpu 2")], True, True),
        ([("a", "gpu 1"), ("a", "gpu 1")], False, False),
        ([("a", "gpu 1"), ("a", "")], False, False),
        ([("a", "gpu 1"), ("a", "other 1")], False, False),
        ([("a", "gpu 1"), ("b", "gpu 2")], False, True),
        ([("a", "gpu 1"), ("b", "gpu 1")], False, True),  # named by their index
        ([("a", "gpu 1"), ("b", "gpu 1"), ("b", "gpu 1")], False, False),
    ],
)
def test_every_rank_needs_a_device_of_its_own(
    places: list[tuple[str, str]], serving: bool, between: bool
) -> None:
    assert serves(places) is serving
    assert serves(places, between_hosts=True) is between


def test_tensors_of_a_device_go_the_devices_way() -> None:
    told: list[Any] = []
    done = SimpleNamespace(is_completed=lambda: True)
    host = SimpleNamespace(
        allreduce=lambda tensors: told.append(("host", *tensors)) or done
    )
    group = Group(host, 0, 2, 1.0)
    device = SimpleNamespace(all_reduce_async=lambda t: told.append(("device", t)))
    near, far = (
        SimpleNamespace(device=torch.device(kind), view_as=lambda other: other)
        for kind in ("cpu", "cuda")  # which gloo takes, too
    )
    group.all_reduce_async(cast("torch.Tensor", far))
    group.devices = cast("Any", device)
    group.all_reduce_async(cast("torch.Tensor", near))
    group.all_reduce_async(cast("torch.Tensor", far))
    assert told == [("host", far), ("host", near), ("device", far)]


def test_what_does_not_end_among_devices_has_the_deadline() -> None:
    group = Group(None, 0, 2, 0.01)
    work = SimpleNamespace(is_completed=lambda: False, wait=lambda: None)
    with pytest.raises(CommunicationError, match="a sum among devices did not"):
        DeviceWork(work, group).wait()


def test_ranks_of_other_hosts_are_told_an_address_and_not_a_name() -> None:
    _, place = device_group.serve_store("localhost", 5.0)
    assert ipaddress.ip_address(place.split()[0]).is_loopback


def _gloo(store: dist.Store, rank: int, world_size: int, deadline: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = deadline
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _is_there(place: str) -> bool:
    """Whether ranks can meet at this address and port."""
    address, port = place.split()
    try:
        socket.create_connection((address, int(port)), 5.0).close()
    except ConnectionRefusedError:
        return False
    return True


def _opened(fault: str, hosts: str) -> tuple[list[float], str, bool]:
    """The sums of a group that is formed under a fault, what was said, what is left."""
    places: list[str] = []
    released = threading.Event()
    with logged(device_group.__name__) as said, joined("gloo") as group:
        group.host = hosts[group.rank]

        def form(store: Any, rank: int, size: int, deadline: timedelta) -> Any:
            places.append(f"{store.host} {store.port}")
            if rank == 1 and fault == "fails":
                raise RuntimeError("no such device")
            if rank == 1 and fault == "hangs":
                released.wait(60.0)
                raise RuntimeError("released")
            made = _gloo(store, rank, size, deadline)
            if rank == 1 and fault == "is wrong":
                made.allreduce([torch.zeros(device_group.TRIED_ELEMENTS)]).wait()
                nothing = SimpleNamespace(wait=lambda: None)
                return SimpleNamespace(allreduce=lambda _: nothing, held=made)
            return made

        waits = fault == "hangs" or (fault == "fails" and group.rank == 0)
        timeout_s = 0.5 if waits else 60.0  # who fails is not late, on a busy machine
        listen = LISTEN if hosts == "ab" else ""
        config = DeviceGroupConfig(timeout_s, form, listen)
        group.ranks = [3, 5]
        found = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_group, "place_of", lambda _: f"nccl {group.rank}")
            try:
                found = open_device_group(group, CPU, config)
            except ConfigError as error:
                said.append(str(error))
        tensor = torch.full((3,), 2.0 + group.rank)
        if found is not None:
            group.wait(found.all_reduce_async(tensor), "a test")
            assert _is_there(places[0])
            gather_texts(group, "", "looking")  # rank 0 removes it
            found.close()
        released.set()
        for thread in threading.enumerate():
            if thread.name == device_group.TRIAL:
                thread.join(60.0)
    is_left = bool(places) and group.rank == 0 and _is_there(places[0])
    return tensor.tolist(), "; ".join(said), is_left


@pytest.mark.distributed
@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("fails", "NCCL does not serve (rank 5: no such device)"),
        ("is wrong", "NCCL does not serve (rank 3: expected sums of 3.0, got [1.0"),
        ("hangs", "NCCL does not serve (rank 3: it did not form in time"),
    ],
)
def test_a_group_is_tried_by_all_and_given_up_by_all(
    ranks2: RankPool, fault: str, words: str, hosts: str
) -> None:
    found = ranks2.run(_opened, fault, hosts, case_setup=meeting)
    works, is_asked = fault == "", hosts == "ab"
    ends = "asks for; leave kind= out" if is_asked else "tensors pass through the host"
    for rank, (sums, said, is_left) in enumerate(found):
        assert sums == [5.0] * 3 if works else [2.0 + rank] * 3
        if words and (is_asked or rank == 0):
            assert said.startswith(words)
            assert said.endswith(ends)
        else:
            assert said == ""
        assert not is_left
