"""What runs beside the computation of a real CUDA device."""

from __future__ import annotations

import time

import pytest
import torch

from elche.comm.transport.device_messages import SideStream

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"
)
LONG_SLEEP_CYCLES = 1_500_000_000  # about a second


def test_it_tells_what_is_computed_and_does_not_wait_for_it() -> None:
    device = torch.device("cuda", 0)
    side = SideStream(device)
    torch.cuda._sleep(LONG_SLEEP_CYCLES)
    is_through = side.computed()
    with side.beside():
        beside = torch.ones(3, device=device)
        assert beside.tolist() == [1.0] * 3
    assert not is_through()
    side.mark_used(beside)
    until_s = time.monotonic() + 60.0
    while not is_through():
        assert time.monotonic() < until_s
