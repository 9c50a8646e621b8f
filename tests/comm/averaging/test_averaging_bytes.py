"""What averaging moves: the model once, a weight, and hardly anything else."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from elche.comm.averaging.averaging import ParameterAverager
from elche.comm.averaging.overlap import OverlappedAverager
from elche.comm.codec.codec import CODECS
from elche.comm.codec.codec_peers import Peers
from elche.comm.codec.coded_exchange import CodedExchange
from tests.comm.averaging.cases.overlap_cases import joined, meeting
from tests.comm.plans import plan
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

WINDOWS = 3
ALLOWED = 1.10
"""Of what a raw all-reduce of one flat tensor would move."""


def _moved(is_overlapped: bool, codec: str) -> tuple[list[int], int]:
    """Bytes that a window hands to the transport, and those of the model."""
    torch.manual_seed(0)
    place, moved = this_place(), []
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(30)), nn.BatchNorm1d(20))
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handed, send = [0], Peers.send_async

    def sending(peers: Peers, memory: torch.Tensor, to: int, tag: int) -> Any:
        handed[0] += memory.numel()
        return send(peers, memory, to, tag)

    counted = mock.patch.object(Peers, "send_async", sending)
    with joined("gloo") as group, counted:
        begin = group.all_reduce_async

        def counting(tensor: torch.Tensor) -> Any:
            handed[0] += tensor.numel() * tensor.element_size()
            return begin(tensor)

        group.all_reduce_async = counting  # type: ignore[method-assign]
        kind = OverlappedAverager if is_overlapped else ParameterAverager
        averager: Any = kind(
            list(model.parameters()), model, lambda: [optimizer], group, codec=codec
        )
        averager.build()
        for window in range(WINDOWS):
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
            before = handed[0]
            reduction = plan(
                place.rank,
                window=window,
                weight=1 / place.world_size,
                active_ranks=place.world_size,
            )
            if is_overlapped:
                averager.snapshot(1 / place.world_size)
                averager.begin(reduction)
                averager.adopt(reduction)
            else:
                averager.synchronise(reduction)
            moved.append(handed[0] - before)
        _leave(averager, group)
    return moved, 4 * numel


def _leave(averager: Any, group: Any) -> None:
    for each in averager._groups:
        if isinstance(each.exchange, CodedExchange):
            each.exchange.flush("a test")
    group.all_reduce(torch.zeros(1), "all ranks to be through")


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_window_moves_the_model_once(ranks2: RankPool, is_overlapped: bool) -> None:
    """Counted as handed to all-reduce, which moves 2 (n - 1) / n times as much."""
    for moved, model_bytes in ranks2.run(
        _moved, is_overlapped, "fp32", case_setup=meeting
    ):
        for each in moved:
            assert model_bytes < each <= ALLOWED * model_bytes


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_a_codec_moves_what_it_promises(ranks2: RankPool, codec: str) -> None:
    """Buffers aside, which travel as they are: the running statistics of one layer."""
    buffers = 4 * 2 * 20 + 8
    for moved, model_bytes in ranks2.run(_moved, False, codec, case_setup=meeting):
        encoded = CODECS[codec].encoded_bytes(model_bytes // 4)
        for each in moved:
            assert encoded <= each <= encoded + 2 * buffers
        assert moved[0] < 0.6 * model_bytes
