"""What ranks run in the tests of SyncBatchNorm under the wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import elche
from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.comm.transport.exchange import SharedExchange
from elche.ddp.wrapper import DistributedDataParallel
from tests.ddp.cases.ddp_cases import Plan, Trace, build, steps, torch_world, wrap
from tests.harness.rank_main import this_place


def converted(seed: int = 3) -> nn.Module:
    """The net with BatchNorm over all ranks."""
    return elche.convert_sync_batchnorm(build("cnn", seed=seed))


def train_norms(plan: Plan) -> tuple[Trace, set[bool]]:
    """The plan on this rank; also whether the layers met in shared memory."""
    with torch_world():
        model = converted(3 + this_place().rank)
        trace = steps(plan, wrap(plan, model))
        (layer,) = sync_batchnorm_layers(model).values()
        exchanges = layer.scope._exchanges.values()
        met = {isinstance(each, SharedExchange) for each in exchanges}
        assert layer.spans_ranks
    return trace, met


def refusals() -> list[str]:
    """What is said to what cannot work, on every rank alike."""
    said = []

    def note(call: Any) -> None:
        try:
            call()
        except elche.ConfigError as error:
            said.append(str(error))

    with torch_world():
        ddp = DistributedDataParallel(converted())
        note(ddp.join_step)
        note(ddp.join)
        out = ddp(torch.ones(2, 6, dtype=torch.float64) * this_place().rank)
        note(lambda: ddp.set_weight(3.0))
        out.sum().backward()
        late = DistributedDataParallel(build("cnn"))
        elche.convert_sync_batchnorm(late)
        note(lambda: late(torch.ones(2, 6, dtype=torch.float64)))
        torchs = nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3))
        note(lambda: DistributedDataParallel(torchs))
    return said
