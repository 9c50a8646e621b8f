"""Evaluation and prediction over ranks: whole batches, divided by measured speed.

The batches are those of one process, so each value equals that of a single device.
Means are rounded once, so they do not depend on the division among ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from elche.comm.norm.norm_scope import NormScope
from elche.config_checks import check_choice
from elche.errors import ConfigError
from elche.runtime.data.batch_weights import BatchWeights, WeightOf
from elche.runtime.data.transfer import to_device
from elche.runtime.loader import RunLoader
from elche.session import ranks
from elche.session.process import process
from elche.session.ranks import gather_rows, map_rows

Values = float | torch.Tensor | dict[str, Any]
"""Result of a step on one batch: a number, or several numbers by name."""


def evaluate(
    step: Callable[[Any], Values],
    loader: DataLoader[Any],
    *,
    weight_of: WeightOf | None = None,
) -> Any:
    """Mean of a function's values over all samples of a loader.

    ::

        model.eval()
        loss = elche.evaluate(lambda b: F.cross_entropy(model(b[0]), b[1]), test_loader)

    Each rank takes as many batches as its speed in the last evaluation, or else in
    training, allows. The batches are those that one device would have, and the mean is
    rounded once, so it does not depend on how ranks divide them. Every rank must call
    it: between epochs, or inside the loop under ``sync``.

    Args:
        step: called without gradient with each batch, on this rank's device; returns
            the batch's mean, or a dictionary of means.
        loader: a DataLoader of the whole set, in order, not through `elche.setup`.
        weight_of: weight of a batch, as in `elche.setup`; None for its samples.

    Returns:
        The mean as a float, or a dictionary of floats; the same on every rank. NaN if a
        batch's value is NaN, or all weights are 0.

    Raises:
        ConfigError: the loader cannot be divided, the step returns another type, there
            is no run, or a loop in windows is in progress.
        CommunicationError: a rank did not call it in time.
    """
    weights = None if weight_of is None else BatchWeights(weight_of, ranks.rank())
    return evaluate_by(lambda batch, weight: step(batch), loader, weights)


def predict(
    step: Callable[[Any], Any],
    loader: DataLoader[Any],
    *,
    on: Literal["all", "main"] = "all",
) -> Any:
    """Results of a function for every sample of a loader, in the data set's order.

    Divided as in `elche.evaluate`, with the same rules for calls.

    Args:
        step: called without gradient with each batch, on this rank's device; returns a
            row for each sample: a tensor, or tensors in lists, tuples and dictionaries.
        loader: a DataLoader of the whole set, in order, not through `elche.setup`.
        on: ``"main"`` returns the rows on rank 0 alone, and None on the others. (They
            still pass through every rank's memory.)

    Returns:
        The same structure with the rows of all samples, on the CPU.

    Raises:
        ConfigError: the loader cannot be divided, the number of rows differs from the
            samples, rows differ in shape, there is no run, or a loop in windows is in
            progress.
        CommunicationError: a rank did not call it in time.
    """
    check_choice("on", on, ("all", "main"))
    part = _Part.of(loader, "elche.predict")
    trees: list[Any] = []
    with torch.no_grad(), NormScope.dividing(part.call):
        for indices, batch in part.batches():
            batch = to_device(batch, ranks.device())
            trees.append(_rows_of(step(batch), len(indices)))
    rows = [_leaves(tree) for tree in trees]
    try:
        columns = [torch.cat(column) for column in zip(*rows, strict=True)]
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"expected rows of one shape from every batch, got others: {error}; pad "
            "them to one length"
        ) from error
    gathered = part.gather(columns)
    if gathered is None:  # a rank has died with its part
        return predict(step, loader, on=on)
    if on == "main" and not ranks.is_main_process():
        return None
    found = iter(gathered)
    return map_rows(trees[0], lambda _: next(found))


def evaluate_by(
    step: Callable[[Any, float], Values],
    loader: DataLoader[Any],
    weights: BatchWeights | None,
    is_over: Callable[[], bool] = lambda: False,
) -> Any:
    """Evaluates like `evaluate`, with a step that also receives the batch's weight.

    Args:
        step: as in `evaluate`, called with the batch and its weight.
        loader: as in `evaluate`.
        weights: weights of batches; None for their samples.
        is_over: polled before each batch; True stops with NaN as the mean.
    """
    part = _Part.of(loader, "elche.evaluate")
    names, is_one = [""], True
    rows: list[list[float]] = []
    with torch.no_grad(), NormScope.dividing(part.call):
        for indices, batch in part.batches():
            if is_over():
                rows.append([1.0, math.nan])
                break
            weight = float(len(indices))
            if weights is not None:
                weight = weights.of(batch, f"evaluation samples from {indices[0]} on")
            values = step(to_device(batch, ranks.device()), weight)
            by_name = values if isinstance(values, dict) else {"": values}
            names, is_one = sorted(by_name), by_name is not values
            rows.append([weight, *(_number(by_name[name]) for name in names)])
    table = part.gather([_float64(rows)])
    if table is None:  # a rank has died with its part
        return evaluate_by(step, loader, weights, is_over)
    weight_column, *columns = table[0].T.tolist()
    means = [_mean(weight_column, column) for column in columns]
    return means[0] if is_one else dict(zip(names, means, strict=True))


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's batches, as indices of samples.

    A rank without batches still gets the first one (``is_own`` is False), to know the
    structure of the others' results.
    """

    loader: DataLoader[Any]
    call: str
    indices: list[list[int]]
    is_own: bool
    speeds: tuple[float, ...]
    began_s: float

    @staticmethod
    def of(loader: DataLoader[Any], call: str) -> _Part:
        length, size = _checked(loader)
        speeds = _speeds_of_rank_0(call)
        start, stop = batches_of(ranks.rank(), speeds, -(-length // size))
        is_own = stop > start
        indices = [
            list(range(batch * size, min(length, (batch + 1) * size)))
            for batch in (range(start, stop) if is_own else range(1))
        ]
        return _Part(loader, call, indices, is_own, speeds, time.monotonic())

    def batches(self) -> Iterator[tuple[list[int], Any]]:
        """Indices and data of each batch; does not use the global random generator."""
        given = self.loader
        loader: DataLoader[Any] = DataLoader(
            given.dataset,
            batch_sampler=self.indices,
            num_workers=given.num_workers,
            collate_fn=given.collate_fn,
            pin_memory=given.pin_memory,
            timeout=given.timeout,
            worker_init_fn=given.worker_init_fn,
            multiprocessing_context=given.multiprocessing_context,
            generator=torch.Generator(),
        )
        with torch.device("cpu"):  # overrides the script's default device
            loaded = iter(loader)
        return zip(self.indices, loaded, strict=True)

    def gather(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Gathers the rows of all ranks; None if a rank has died with its part.

        Stores the ranks' speeds for the next evaluation.
        """
        samples = sum(map(len, self.indices)) if self.is_own else 0
        speed = samples / max(time.monotonic() - self.began_s, 1e-9)
        stop = None if self.is_own else 0
        speeds, *rows = (
            gather_rows(each, self.call, is_of_batch=False)
            for each in (_float64([speed]), *(column[:stop] for column in columns))
        )
        if len(self.speeds) != ranks.world_size():
            return None
        pairs = zip(speeds.tolist(), self.speeds, strict=True)
        process.evaluation_speeds = tuple(new or old for new, old in pairs)
        return rows


def _speeds_of_rank_0(call: str) -> tuple[float, ...]:
    """Speeds known to rank 0, on which ranks with other measurements must agree."""
    agreed: tuple[float, ...] = ()
    while len(agreed) != ranks.world_size():  # repeat if a rank has died
        mine = _float64(_known_speeds() if ranks.rank() == 0 else ())
        agreed = tuple(gather_rows(mine, call, is_of_batch=False).tolist())
    return agreed


def _known_speeds() -> tuple[float, ...]:
    """Speeds in the last evaluation, else in training, else equal speeds."""
    last = None if process.metrics is None else process.metrics.find(None)
    trained = () if last is None else last.rank_samples_per_s
    for speeds in (process.evaluation_speeds, trained):
        if len(speeds) == ranks.world_size():
            return speeds if sum(speeds) > 0.0 else (1.0,) * len(speeds)
    return (1.0,) * ranks.world_size()


def _float64(rows: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def batches_of(rank: int, speeds: Sequence[float], batches: int) -> tuple[int, int]:
    """First and end index of a rank's batches, divided by speed."""
    total = math.fsum(speeds)

    def end(count: int) -> int:
        return round(batches * math.fsum(speeds[:count]) / total)

    return end(rank), batches if rank + 1 == len(speeds) else end(rank + 1)


def _checked(loader: object) -> tuple[int, int]:
    """Number of samples, and batch size.

    Raises:
        ConfigError: the loader cannot be divided in the order of its data set.
    """
    if isinstance(loader, RunLoader) or not isinstance(loader, DataLoader):
        raise ConfigError(
            "expected a DataLoader of the whole evaluation set, got "
            f"{type(loader).__name__}; give the loader itself, not what elche.setup "
            "has returned"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "expected a map-style data set, got an IterableDataset; its parts are "
            "evaluated by index"
        )
    is_plain = type(loader.sampler) is SequentialSampler
    if loader.batch_size is None or not is_plain or loader.drop_last:
        what = "drop_last" if is_plain and loader.batch_size else "a sampler"
        raise ConfigError(
            f"expected a loader over all samples in their order, got one with {what}; "
            "leave out shuffle=, sampler=, batch_sampler= and drop_last=: the ranks "
            "divide it themselves"
        )
    length = len(loader.dataset)  # type: ignore[arg-type]
    if length == 0:
        raise ConfigError("the evaluation set is empty; expected at least one sample")
    return length, loader.batch_size


def _number(value: Any) -> float:
    is_tensor = isinstance(value, torch.Tensor)
    if isinstance(value, int | float) or (is_tensor and value.numel() == 1):
        return float(value)
    shape = f" of shape {list(value.shape)}" if is_tensor else ""
    raise ConfigError(
        "expected the mean over the batch as a number, or a dictionary of such, got "
        f"{type(value).__name__}{shape}"
    )


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    """Weighted mean, rounded once; values with weight 0 are ignored."""
    parts = [(w, v * w) for w, v in zip(weights, values, strict=True) if w]
    try:
        return math.fsum(v for _, v in parts) / math.fsum(w for w, _ in parts)
    except (OverflowError, ValueError, ZeroDivisionError):
        return math.nan


def _rows_of(tree: Any, samples: int) -> Any:
    def checked(rows: torch.Tensor) -> torch.Tensor:
        if not rows.dim() or rows.shape[0] != samples:
            raise ConfigError(
                f"expected a row for each of {samples} samples, got a tensor of shape "
                f"{list(rows.shape)}"
            )
        return rows.to("cpu")

    return map_rows(tree, checked)


def _leaves(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_rows(tree, found.append)
    return found
