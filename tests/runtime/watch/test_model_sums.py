"""Checksums of tensors: every change of a value is another sum."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.accounts.model_checks import EVERY_STEPS, ModelCheck
from elche.runtime.watch.model_sums import ModelSums

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8)


def tensors_of(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Of several kinds, some not contiguous, one without dimensions."""
    generator = torch.Generator().manual_seed(seed)
    wide = [
        torch.randn(150, 170, generator=generator),
        torch.randn(7, 3, 5, 2, generator=generator).to(
            memory_format=torch.channels_last
        ),
        torch.randn(40, 30, generator=generator).t(),
    ]
    drawn = [torch.randn(9, 4, generator=generator) * 9 for _ in KINDS]
    kinds = [each.to(kind) for each, kind in zip(drawn, KINDS, strict=True)]
    tensors = [*wide, *kinds, torch.tensor(1.5), torch.zeros(0, 3)]
    return [(f"t{at}", tensor) for at, tensor in enumerate(tensors)]


def changed(tensor: torch.Tensor, at: int) -> None:
    """One bit of one value."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), flat.shape)]
    value = flat[tuple(place)].clone().view(1).view(torch.uint8)
    value[0] ^= 1
    flat[tuple(place)] = value.view(flat.dtype)[0]


@given(st.integers(0, 8), st.integers(0, 10**6))
def test_a_changed_bit_is_found_within_one_rotation(index: int, at: int) -> None:
    mine, theirs = tensors_of(3), tensors_of(3)
    sums, others = ModelSums(mine), ModelSums(theirs)
    assert sums.whole() == others.whole()
    name, tensor = theirs[index]
    changed(tensor, at % (tensor.numel() * (1 + tensor.is_complex())))
    found = []
    for turn in range(len(sums.whole())):
        step = EVERY_STEPS * (turn + 1)
        sums.begin(step, turn)
        others.begin(step, turn)
        for one, other in zip(sums.take(step), others.take(step), strict=True):
            found += [one[1]] if one != other else []
            assert one[3] != other[3] or one == other
    assert len(found) == 1
    assert name in found[0] or "more" in found[0]


def test_another_order_of_the_same_values_is_another_sum() -> None:
    """Once: rows that a rank had exchanged, or signs, summed to the same."""
    values = torch.randn(64, 4)
    sums = {
        ModelSums([("w", each)]).whole()[0][3]
        for each in (values, values.flip(0), values.flip(1), -values)
    }
    assert len(sums) == 4


def test_a_common_tensor_stands_for_a_parameter() -> None:
    own, common = torch.ones(4), torch.full((4,), 2.0)
    sums = ModelSums([("w", own)])
    sums.begin(5, 5, {id(own): common})
    (row,) = sums.take(5)
    assert ModelCheck(*row).total == 8.0
    sums.begin(6, 0)
    assert sums.take(5) == ()
    assert len(sums.take(6)) == 1
    assert sums.take(6) == ()


def test_sums_are_those_of_the_values() -> None:
    tensor = torch.randn(100, 3).bfloat16()
    check = ModelCheck(*ModelSums([("w", tensor)], "kind").whole()[0])
    wide = tensor.double()
    assert math.isclose(check.total, wide.sum().item(), abs_tol=1e-12)
    assert math.isclose(check.squares, wide.square().sum().item(), rel_tol=1e-12)
    assert (check.kind, check.values, check.what) == ("kind", 300, "w")
