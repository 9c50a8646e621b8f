"""How gradients are packed into buckets, without any group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elche.comm.gradients.buckets.bucket import Bucket, PassOptions
from elche.comm.gradients.buckets.bucket_queue import make_buckets
from tests.comm.bus import Bus

DTYPES = (torch.float32, torch.bfloat16, torch.complex64)


def parameter(numel: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(numel, dtype=dtype))


@given(
    kinds=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from(DTYPES)), min_size=1, max_size=30
    ),
    capacity=st.integers(1, 400),
)
def test_every_parameter_once_in_order_and_within_capacity(
    kinds: list[tuple[int, torch.dtype]], capacity: int
) -> None:
    parameters = [parameter(*kind) for kind in kinds]
    buckets = make_buckets(parameters, capacity)
    packed = [p for bucket in buckets for p in bucket.parameters]
    assert [id(p) for p in packed] == [id(p) for p in parameters]
    for bucket in buckets:
        assert len({p.dtype for p in bucket.parameters}) == 1
        assert bucket.size_bytes <= capacity or len(bucket.parameters) == 1
    last = buckets[-1].parameters
    assert len(last) == 1 or sum(each.nbytes for each in last) <= capacity // 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_sums_keep_shape_strides_and_flags(
    dtype: torch.dtype, order: tuple[int, ...]
) -> None:
    ranks = []
    for group in Bus(2).groups():
        dense = torch.zeros(2, 3, 4, 5, dtype=dtype).permute(order)
        bucket = Bucket([nn.Parameter(dense), parameter(3, dtype)])
        bucket.open(group, PassOptions(1))
        bucket.parameters[0].grad = torch.ones_like(dense) * (group.rank + 1)
        ranks.append(bucket)
    for bucket, scale in zip(ranks, (0.5, 0.25), strict=True):
        bucket.send(scale)
    for bucket in ranks:
        bucket.finish()
        bucket.rescale(2.0)
        total = bucket.summed[0]
        assert total.shape == bucket.parameters[0].shape
        if not dtype.is_complex:
            assert total.stride() == bucket.parameters[0].stride()
        assert bool((total == 2 * (0.5 * 1 + 0.25 * 2)).all())
        assert bucket.used() == [True, False]


def test_a_scale_of_zero_sends_zeros_not_zero_times_something() -> None:
    first, second = Bus(2).groups()
    buckets = []
    for group, value in ((first, float("nan")), (second, 3.0)):
        bucket = Bucket([parameter(2)])
        bucket.open(group, PassOptions(1))
        bucket.parameters[0].grad = torch.full((2,), value)
        buckets.append(bucket)
    buckets[0].send(0.0)
    buckets[1].send(1.0)
    for bucket in buckets:
        bucket.finish()
        assert bucket.summed[0].tolist() == [3.0, 3.0]
        assert bucket.used() == [True]
