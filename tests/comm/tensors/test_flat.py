"""Tensors in flat memory: every element has one place, in every cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elche.comm.tensors.flat import FlatLayout, cut

shapes = st.lists(
    st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6
)


def numbered(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Parameters whose elements are counted through."""
    made, at = [], 1
    for shape in shapes:
        numel = torch.Size(shape).numel()
        values = torch.arange(at, at + numel, dtype=torch.float32).view(shape)
        made.append(nn.Parameter(values.to(dtype)))
        at += numel
    return made


@given(shapes, st.integers(1, 40))
def test_segments_cover_everything_once(
    shapes: list[tuple[int, ...]], limit: int
) -> None:
    tensors = numbered(shapes)
    segments = cut(tensors, limit)
    edges = [0] + [segment.stop for segment in segments]
    assert [segment.start for segment in segments] == edges[:-1]
    assert edges[-1] == sum(tensor.numel() for tensor in tensors)
    for segment in segments:
        assert segment.numel > 0
        assert segment.numel <= limit or segment.last - segment.first == 1
        held = sum(t.numel() for t in tensors[segment.first : segment.last])
        assert segment.numel == held or segment.offset is not None


@pytest.mark.parametrize("in_parts", ["image", "scratch"])
@given(shapes=shapes, limit=st.integers(1, 40))
def test_what_is_read_and_written_back_is_the_same(
    in_parts: str, shapes: list[tuple[int, ...]], limit: int
) -> None:
    tensors = numbered(shapes)
    layout = FlatLayout(tensors, torch.float32, limit)
    image = getattr(layout, in_parts)()
    seen = []
    with torch.no_grad():
        for index in range(len(layout.segments)):
            layout.read(index, image)
            seen += image.parts[index].tolist()
            image.parts[index].mul_(2)
            layout.write(index, image)
            image.parts[index].fill_(1)
            layout.add(index, image)
    assert seen == list(range(1, layout.numel + 1))
    held = [value for tensor in tensors for value in tensor.flatten().tolist()]
    assert held == [2 * value + 1 for value in range(1, layout.numel + 1)]


@pytest.mark.parametrize("limit", [3, 1000])
def test_other_memory_formats_are_laid_out_row_by_row(limit: int) -> None:
    values = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    tensor = values.clone(memory_format=torch.channels_last)
    layout = FlatLayout([tensor], torch.float32, limit)
    image = layout.image()
    for index in range(len(layout.segments)):
        layout.read(index, image)
    assert image.flat.tolist() == list(range(120))
    image.flat.neg_()
    for index in range(len(layout.segments)):
        layout.write(index, image)
    assert torch.equal(tensor, -values)


def test_half_precision_is_widened_and_rounded_back() -> None:
    tensors = numbered([(3,), (2, 2)], torch.bfloat16)
    layout = FlatLayout(tensors, torch.float32)
    image = layout.image()
    with torch.no_grad():
        layout.read(0, image)
        assert image.flat.tolist() == [1, 2, 3, 4, 5, 6, 7]
        image.flat.fill_(0.25)
        layout.add(0, image)
    assert tensors[0].tolist() == [1.25, 2.25, 3.25]
    assert tensors[0].dtype == torch.bfloat16


def test_a_layout_knows_which_tensors_fit() -> None:
    layout = FlatLayout(numbered([(2, 3)]), torch.float32)
    assert layout.fits(numbered([(2, 3)]))
    assert not layout.fits(numbered([(3, 2)]))
    assert not layout.fits(numbered([(2, 3)], torch.bfloat16))
    assert not layout.fits([torch.ones(3, 2).t()])
