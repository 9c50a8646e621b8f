"""The process group, as one process can see it."""

from __future__ import annotations

import pytest
import torch

from elche.comm.transport import process_group
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
