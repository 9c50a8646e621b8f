"""Pipelines whose tensors go from device to device, with gloo in NCCL's place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from elche.comm.transport import device_group
from elche.pipeline.peers import peers
from tests.comm.transport.thread_link import Beside
from tests.harness.logged import logged
from tests.harness.rank_main import this_place
from tests.pipeline.cases.pipeline_cases import Trained, Work, piped


class Pollable:
    """A transfer of gloo that can be asked whether it is through, as NCCL's."""

    def __init__(self, work: Any) -> None:
        self._error = ""
        self._work = work
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = str(error)

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error:
            raise RuntimeError(self._error)


@dataclass
class Wire:
    """A group of the ranks: transfers in order, without tags."""

    made: Any
    sent: list[int] = field(default_factory=list)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Pollable:
        self.sent.append(rank)
        return Pollable(self.made.send(tensors, rank, 0))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Pollable:
        return Pollable(self.made.recv(tensors, rank, 0))

    def abort(self) -> None:
        self.made.shutdown()


@contextmanager
def devices(fails: bool = False) -> Iterator[tuple[list[Wire], list[str]]]:
    """Ranks with a device each; their group, once it is formed, and what is logged."""
    wires: list[Wire] = []
    place = this_place()

    def form(store: dist.Store, rank: int, size: int, deadline: timedelta) -> Wire:
        if fails and rank == 0:
            raise RuntimeError("no such device")
        deadline = timedelta(seconds=3) if fails else deadline
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = deadline
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        wires.append(Wire(dist.ProcessGroupGloo(store, rank, size, options)))
        return wires[-1]

    with logged(device_group.__name__) as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_group, "place_of", lambda _: f"nccl {place.rank}")
        patch.setattr(peers, "form_group", lambda _, *where: form(*where))
        patch.setattr(peers, "SideStream", lambda _: Beside())
        yield wires, said


def by_devices(work: Work, fails: bool = False) -> tuple[Trained, list[int], str]:
    """The work; how often its group was used, and what was logged."""
    with devices(fails) as (wires, said):
        found = piped(work)
    return found, [len(wire.sent) for wire in wires], "; ".join(said)
