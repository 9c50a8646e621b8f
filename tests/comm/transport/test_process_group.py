"""The process group, as one process can see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elche.comm.transport import process_group
from elche.comm.transport.exchange import succeeded
from elche.comm.transport.process_group import Group


@pytest.mark.parametrize("may_deadlock", [True, False])
def test_a_tensor_outlives_gloos_thread_where_a_fork_would_hang(
    monkeypatch: pytest.MonkeyPatch, may_deadlock: bool
) -> None:
    """Torch's last reference would be given up under the interpreter's lock."""
    monkeypatch.setattr(process_group, "FORK_MAY_DEADLOCK", may_deadlock)
    group = Group.alone(timeout_s=1.0)
    summed, copied = torch.ones(3, requires_grad=True), torch.ones(2)
    before = summed._use_count(), copied._use_count()
    group.all_reduce(summed, "a sum")
    group.broadcast(copied, "a copy")
    more = int(may_deadlock)
    assert summed._use_count() == before[0] + more
    assert copied._use_count() == before[1] + more


class Doubling:
    """In gloo's place: two equal ranks, whose sum is there once it is waited for."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Doubling:
        self.sent, self.waits = tensors[0], 0
        return self

    def broadcast(self, tensor: torch.Tensor, root: int) -> Doubling:
        return self.allreduce([tensor])

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            self.sent.mul_(2.0)


def test_tensors_that_gloo_does_not_take_go_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group, "gloo_takes", lambda tensor: False)
    gloo: Any = Doubling()
    group = Group(gloo, 0, 2, 1.0)
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()
    work = group.all_reduce_async(tensor)
    assert gloo.sent.data_ptr() != tensor.data_ptr()
    assert succeeded(work)  # asked from wherever: the device's tensor stays
    assert tensor.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    group.wait(work, "a sum")
    assert tensor.tolist() == [[2.0, 6.0], [4.0, 8.0]]
    group.broadcast(tensor, "a copy")
    assert tensor.tolist() == [[4.0, 12.0], [8.0, 16.0]]
    group.leave()  # gloo's own works are kept, which the copies belong to
    assert process_group._left.pop()[1] == [gloo]
