"""Parts of optimizer steps: every sample once, in micro-batches that fit."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from elche.comm.transport.process_group import Group
from elche.errors import ConfigError
from elche.integrations.counted_epochs import CountedEpochs
from elche.integrations.optimizer_steps import (
    StepCollate,
    StepEpochs,
    StepSampler,
    items_of,
    step_loader,
)
from elche.integrations.shared_figures import MOST_STEPS, StepLosses


@given(
    samples=st.integers(1, 40),
    size=st.integers(1, 8),
    count=st.integers(1, 5),
    skipped_steps=st.integers(0, 3),
)
def test_steps_join_batches(
    samples: int, size: int, count: int, skipped_steps: int
) -> None:
    batches = list(BatchSampler(SequentialSampler(range(samples)), size, False))
    sampler = StepSampler(batches, count)
    steps = list(sampler)
    joined = [
        list(chain(*batches[at : at + count])) for at in range(0, len(batches), count)
    ]
    assert steps == joined
    assert len(sampler) == len(steps)
    sampler.skipped = skipped_steps * count
    assert list(sampler) == steps[skipped_steps:]


@given(samples=st.integers(1, 30), most=st.integers(1, 8), shifts=st.booleans())
def test_items_are_the_labels_that_count(samples: int, most: int, shifts: bool) -> None:
    rows = [torch.arange(index % 5 + 1) for index in range(samples)]

    def collate(part: Any) -> dict[str, torch.Tensor]:
        padded = torch.nn.utils.rnn.pad_sequence(part, True, -100)
        return {"labels": padded}

    batch = StepCollate(collate, most, shifts)(rows)
    assert [len(part["labels"]) for part in batch.parts] == [
        min(most, samples - at) for at in range(0, samples, most)
    ]
    assert items_of(batch) == sum(len(row) - shifts for row in rows)
    assert batch.has_labels


def test_without_labels_samples_count() -> None:
    batch = StepCollate(torch.stack, 2, True)([torch.zeros(3)] * 5)
    assert (batch.items, batch.has_labels) == ([2.0, 2.0, 1.0], False)


def test_accumulated_batches_need_a_size() -> None:
    loader: DataLoader[Any] = DataLoader(range(9), batch_sampler=[[0, 1], [2]])
    assert [b.parts[0].tolist() for b in step_loader(loader, 1, shifts_labels=False)[0]]
    with pytest.raises(ConfigError, match="set gradient_accumulation_steps=1"):
        step_loader(loader, 2, shifts_labels=False)


def test_an_epoch_ends_behind_its_last_step_alone() -> None:
    loader: DataLoader[Any] = DataLoader(range(6), batch_size=2)
    steps, sampler = step_loader(loader, 2, shifts_labels=False)
    ended: list[int] = []

    class Steps:
        def __len__(self) -> int:
            return len(steps)

        def __iter__(self) -> Any:
            yield from steps
            ended.append(1)

    epochs = StepEpochs(loader, Steps(), sampler).skip(2)
    for left in (1, 2):
        iterator = iter(epochs)
        for _ in range(left):
            epochs.end()
            assert len(ended) == left - 1
            next(iterator)
        epochs.end()
        assert len(ended) == left


def test_an_epoch_without_batches_is_left() -> None:
    """Lightning asks for its iterator, and for no batch of it."""
    epochs = CountedEpochs((), ())
    iter(epochs)
    epochs.leave()
    assert not epochs.is_under_way


def test_losses_are_summed_over_steps() -> None:
    """Weight 0 adds nothing, and NaN is hidden where that is asked for."""
    for hides, expected in ((True, MOST_STEPS + 2.0), (False, float("nan"))):
        losses = StepLosses(Group.alone(10.0), hides_non_finite=hides)
        for _ in range(MOST_STEPS + 1):
            losses.begin_step(3.0)
            losses.add(torch.tensor(0.25))
            losses.add(torch.tensor(0.75))
        losses.begin_step(2.0)
        losses.add(torch.tensor(float("nan")))
        assert losses.take() == pytest.approx(expected, nan_ok=True)
        assert losses.take() == 0.0
