"""What all ranks hold alike is what travels; the rest is each rank's own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elche.comm.model_buffers.buffers import BufferAverager, BufferWatch
from elche.comm.model_buffers.known_buffers import BufferKind, KnownBuffers
from elche.errors import CommunicationError
from tests.comm.thread_group import on_ranks

Form = tuple[tuple[int, ...], torch.dtype]


def agreed(group: Any, forms: dict[str, Form]) -> tuple[KnownBuffers, nn.Module, int]:
    """A model with such buffers, and what its rank knows of them."""
    model = nn.Module()
    for name, (shape, dtype) in forms.items():
        model.register_buffer(name, torch.ones(shape, dtype=dtype))
    known = KnownBuffers(model)
    known.agree(group)
    return known, model, group.reductions


def names_of(known: KnownBuffers) -> list[str]:
    names = list(known.numbers)
    return [names[number] for number, _, _ in known.common()]


kinds = st.tuples(
    st.sampled_from([(), (1,), (2,), (2, 3)]),
    st.sampled_from(
        [torch.float32, torch.float64, torch.int64, torch.complex64, torch.bool]
    ),
)
models = st.permutations("abcd").flatmap(
    lambda names: st.fixed_dictionaries({}, optional=dict.fromkeys(names, kinds))
)


@given(st.lists(models, min_size=2, max_size=3))
@settings(max_examples=60, deadline=None)
def test_all_ranks_lay_out_what_each_of_them_holds(
    ranks: list[dict[str, Form]],
) -> None:
    found = on_ranks(len(ranks), agreed, ranks)
    expected = [
        name
        for name, form in ranks[0].items()
        if all(name in each and _alike(each[name], form) for each in ranks)
    ]
    for known, _, _ in found:
        assert names_of(known) == expected
        assert known.kinds == found[0][0].kinds


def _alike(one: Form, other: Form) -> bool:
    first, second = (
        BufferKind(torch.Size(shape), dtype) for shape, dtype in (one, other)
    )
    return first.is_like(second)


def test_the_widest_precision_is_what_travels() -> None:
    forms = [{"a": ((2,), dtype)} for dtype in (torch.float32, torch.float64)]
    for known, _, _ in on_ranks(2, agreed, forms):
        assert [kind.dtype for kind in known.kinds] == [torch.float64]


def test_numbers_follow_rank_0_and_later_buffers_have_none() -> None:
    forms = [
        {"a": ((2,), torch.float32), "b": ((), torch.int64), "c": ((1,), torch.bool)},
        {"c": ((1,), torch.bool), "b": ((), torch.int64), "a": ((3,), torch.float32)},
    ]
    for known, model, _ in on_ranks(2, agreed, forms):
        assert names_of(known) == ["b", "c"]
        model.register_buffer("late", torch.zeros(2))
        places = [name for name, _ in model.named_buffers()]
        assert known.numbers_of([places.index("c")]) == {1}
        assert known.numbers_of([places.index("a"), places.index("late")]) == set()


def test_a_rank_that_has_resized_one_holds_it_no_more() -> None:
    ((known, model, _),) = on_ranks(
        1, agreed, [{"a": ((2,), torch.float32), "b": ((), torch.int64)}]
    )
    model.a = torch.zeros(3)
    assert known.present()[0] is None
    assert names_of(known) == ["b"]
    model.a = torch.zeros(2, dtype=torch.float64)  # another precision will do
    assert names_of(known) == ["a", "b"]


def test_people_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def twice(group: Any, model: nn.Module) -> None:
        for _ in range(2):
            KnownBuffers(model).agree(group)
        known = KnownBuffers(model)
        known.agree(group)
        for _ in range(2):
            known.keep_own([0])

    ranks = [nn.Module(), nn.Module()]
    for rank, model in enumerate(ranks):
        model.register_buffer("mean", torch.zeros(2))
        model.register_buffer("cache", torch.zeros(2 + rank))
    with caplog.at_level(logging.INFO, "elche.comm.model_buffers.known_buffers"):
        on_ranks(2, twice, ranks)
    said = sorted(record.getMessage() for record in caplog.records)
    assert said == sorted(
        f"buffers {name}: each rank keeps its own" for name in ("cache", "mean") * 2
    )


def test_a_buffer_of_another_dtype_has_been_written() -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.ones(2))
    watch = BufferWatch(model)
    assert watch.written() == []
    model.mean.data = model.mean.data.double()
    assert watch.written() == [0]


def test_buffers_whose_agreement_failed_do_not_travel() -> None:
    def failed(group: Any) -> list[int]:
        model = nn.BatchNorm1d(2)
        averager = BufferAverager(model, KnownBuffers(model), group)
        sizes: list[int] = []
        reduce = averager._reduce

        def failing(buffers: Any, indices: list[int], *rest: Any) -> set[int]:
            sizes.append(len(indices))
            if len(sizes) == 2:  # the message after the flags
                raise CommunicationError("a rank has died")
            return reduce(buffers, indices, *rest)

        averager._reduce = failing  # type: ignore[method-assign]
        with pytest.raises(CommunicationError, match="a rank has died"):
            averager.average(2, mine=True)
        averager.average(2, mine=True)  # in the survivors' group
        averager.average(2, mine=True)
        return sizes

    for sizes in on_ranks(2, failed):
        assert sizes[0] == sizes[2] == 0, "other ranks may not have agreed"
        assert sizes[1] == sizes[3] > 0
        assert sizes[4] == 2
