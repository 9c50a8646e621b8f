"""Batches of whole optimizer steps, made from a loader of micro-batches.

A loop that accumulates gradients reads several batches per optimizer step. Here the
ranks share the step: each collates its part of the step's samples into micro-batches of
at most the loader's ``batch_size``, with the number of items in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from elche.errors import ConfigError
from elche.integrations.counted_epochs import CountedEpochs

IGNORED_LABEL = -100


class StepBatch(NamedTuple):
    """This rank's part of an optimizer step.

    Attributes:
        parts: micro-batches, as the loader collates them.
        items: divisor of each micro-batch's mean loss: counted labels, or samples if
            the batch has no labels.
        has_labels: whether `items` counts labels.
    """

    parts: list[Any]
    items: list[float]
    has_labels: bool


def items_of(batch: StepBatch) -> float:
    """Weight of this rank's part of the step; for ``weight_of``."""
    return sum(batch.items)


@final
class StepSampler(Sampler[list[Any]]):
    """Joins consecutive batches into steps.

    Args:
        batches: the loader's batch sampler.
        count: batches per step; an epoch's last step may have fewer.

    Attributes:
        count: as given.
        skipped: number of batches to skip at the start of an epoch.
    """

    def __init__(self, batches: Iterable[list[Any]], count: int) -> None:
        self._batches = batches
        self.count = count
        self.skipped = 0

    def __iter__(self) -> Iterator[list[Any]]:
        batches = islice(self._batches, self.skipped, None)
        while step := list(islice(batches, self.count)):
            yield list(chain.from_iterable(step))

    def __len__(self) -> int:
        return -(-len(self._batches) // self.count)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StepCollate:
    """Collates the samples of a step's part in micro-batches, and counts their items.

    Attributes:
        collate: collate function for a micro-batch.
        most_samples: most samples per micro-batch; None for no limit.
        shifts_labels: whether the loss predicts each label from the ones before it, so
            that the first label of a row does not count.
    """

    collate: Callable[[Any], Any]
    most_samples: int | None
    shifts_labels: bool

    def __call__(self, samples: Sequence[Any]) -> StepBatch:
        """Collates these samples into the part of a step."""
        most = self.most_samples or len(samples)
        cut = [samples[at : at + most] for at in range(0, len(samples), most)]
        parts = [self.collate(each) for each in cut]
        labels = [self._labels_of(part) for part in parts]
        counted = [float(each) for each in labels if each is not None]
        if len(counted) == len(parts):
            return StepBatch(parts, counted, True)
        return StepBatch(parts, [float(len(each)) for each in cut], False)

    def _labels_of(self, part: Any) -> float | None:
        """Number of counted labels; None without a tensor of labels."""
        labels = part.get("shift_labels") if hasattr(part, "get") else None
        if labels is None and hasattr(part, "get"):
            labels = part.get("labels")
            if self.shifts_labels and isinstance(labels, torch.Tensor):
                labels = labels[..., 1:]
        if not isinstance(labels, torch.Tensor):
            return None
        return float(labels.ne(IGNORED_LABEL).sum())


def step_loader(
    loader: DataLoader[Any], count: int, *, shifts_labels: bool
) -> tuple[DataLoader[Any], StepSampler | None]:
    """A loader of optimizer steps over the same data, with the same workers.

    Args:
        loader: loader of micro-batches.
        count: micro-batches per step.
        shifts_labels: as in `StepCollate`.

    Returns:
        The loader, and its sampler; the sampler is None for an IterableDataset.

    Raises:
        ConfigError: the loader's micro-batches have no fixed size.
    """
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    if count > 1 and not isinstance(size, int):
        raise ConfigError(
            "expected a train loader with a batch_size where gradients are accumulated "
            f"({count} batches per step), got batches of {type(loader.batch_sampler)}; "
            "set gradient_accumulation_steps=1"
        )
    most = size if count > 1 else None
    sampler: StepSampler | None = None
    how: dict[str, Any]
    if isinstance(loader.dataset, IterableDataset):
        how = {"batch_size": count * (size or 1), "drop_last": loader.drop_last}
    else:
        sampler = StepSampler(loader.batch_sampler or [], count)
        how = {"batch_sampler": sampler}
    steps: DataLoader[Any] = DataLoader(
        loader.dataset,
        collate_fn=StepCollate(loader.collate_fn, most, shifts_labels),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory and torch.accelerator.is_available(),
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
        **how,
    )
    return steps, sampler


@final
class StepEpochs(CountedEpochs):
    """Train loader for a loop that iterates by itself and counts micro-batches.

    Args:
        loader: loader of the loop's framework, for all other attributes.
        steps: return value of `elche.setup` for `step_loader`'s loader.
        sampler: sampler of that loader.
    """

    def __init__(self, loader: Any, steps: Any, sampler: StepSampler | None) -> None:
        super().__init__(loader, steps)
        self._sampler = sampler
        self._skipped = 0

    def __iter__(self) -> Iterator[StepBatch]:
        super().__iter__()
        if self._sampler is not None:
            self._sampler.skipped, self._skipped = self._skipped, 0
            self._left -= self._sampler.skipped // self._sampler.count
        return self

    def skip(self, batches: int) -> StepEpochs:
        """Skips micro-batches at the start of the next epoch; only whole steps."""
        self._skipped = batches
        return self
