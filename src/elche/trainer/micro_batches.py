"""Runs batches in micro-batches if the device cannot hold them at once.

This needs a loop owned by the library, which can rerun forward and backward. When the
device runs out of memory, the attempt is rolled back (gradients, statistics, random
numbers). The batch is run again in more micro-batches (2, 3, 4, then half as many
again), whose gradients sum to the whole batch's. The size that fits becomes the
device's cap; it is more than half of the possible size. The ranks still reduce once:
the others only see the time it takes.

Statistics and random numbers are saved only for batches larger than any before, not at
every step. If a size fails that fitted before (longer samples, fragmented memory),
statistics keep the contribution of the failed attempt.

Buckets of gradients that the failed backward pass has already sent stay sent. A bucket
is sent when all its gradients are complete, and gradients of the same samples are
equal, however these are divided. (With dropout they are those of the first masks.)
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from elche.cadence.split import passes_of
from elche.comm.norm.sync_batch_norm import sync_batchnorm_layers
from elche.comm.tensors.nested import batch_length
from elche.devices import choice, memory, random_state
from elche.errors import ConfigError
from elche.runtime.data.batch_weights import BatchWeights
from elche.runtime.run import Run
from elche.torch_internals.batches import tree_leaves, tree_map

logger = logging.getLogger(__name__)


@final
class MicroBatches:
    """Runs batches forward and backward, in as few parts as the device needs.

    Args:
        model: the model, in training mode.
        device: device of the model.
        max_samples: most samples that the device holds at once; None if unknown.
        least_samples: minimum samples of a micro-batch: BatchNorm cannot train on one.
        is_sum: whether the loss is a sum over samples instead of their mean.
        weights: weight of a part of a batch in that mean; None for its samples.
        host: the run on several ranks; None on one rank.
        on_part: called before each micro-batch with its fraction of the batch, 0 to 1.

    Attributes:
        max_samples: most samples that the device holds at once; None if unknown.

    Raises:
        ConfigError: with this ``max_samples`` some larger batches cannot be divided.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        max_samples: int | None,
        least_samples: int,
        is_sum: bool,
        weights: BatchWeights | None,
        host: Run | None,
        on_part: Callable[[float], None],
    ) -> None:
        self._least_cap = 2 * least_samples - 1
        if max_samples is not None and max_samples < self._least_cap:
            raise ConfigError(
                f"expected max_samples of at least {self._least_cap} for a model that "
                f"trains on {least_samples} samples and more, got {max_samples}"
            )
        self._model = model
        self._device = device
        self._is_sum = is_sum
        self._weights = weights
        self._host = host
        self._on_part = on_part
        self._buffers = tuple(model.buffers())  # a forward pass may write them
        self._proven = 0
        self.max_samples = max_samples

    def backward(
        self, batch: Any, samples: int, loss_of: Callable[[Any], torch.Tensor]
    ) -> torch.Tensor:
        """Adds the gradient of a batch's loss to ``p.grad``, which must be None before.

        Args:
            batch: batch on the device.
            samples: samples of the batch; 0 if unknown.
            loss_of: scalar loss of a batch, or of a part of it.

        Returns:
            The loss of the whole batch, detached.

        Raises:
            ConfigError: the device runs out of memory and the batch cannot be divided
                (further); the message has the reason.
        """
        before: _Moment | None = None
        while True:
            parts = self._divide(batch, samples)
            if parts[0][1] > self._proven and before is None:
                before = _Moment(self._device, self._buffers)
            try:
                loss = self._run(parts, loss_of)
            except RuntimeError as error:
                if not memory.is_out_of_memory(error):
                    raise
                self._learn(parts, batch, samples, error)
            else:
                self._proven = max(self._proven, parts[0][1])
                return loss
            # Outside of the handler, whose traceback keeps the attempt's tensors alive.
            self._take_back(before)

    def _divide(self, batch: Any, samples: int) -> list[tuple[Any, int]]:
        """Micro-batches of almost equal size, larger ones first, with their samples."""
        length = batch_length(batch)
        count = passes_of(length, self.max_samples)
        if count == 1 or self._why_whole(length, batch, samples):
            return [(batch, length)]
        edges = [-(-length * index // count) for index in range(count + 1)]
        return [
            (cut_batch(batch, start, stop, length), stop - start)
            for start, stop in itertools.pairwise(edges)
        ]

    def _run(
        self, parts: Sequence[tuple[Any, int]], loss_of: Callable[[Any], torch.Tensor]
    ) -> torch.Tensor:
        if len(parts) == 1:
            loss = loss_of(parts[0][0])
            loss.backward()
            return loss.detach()
        weighed = self._weighed(parts)
        total: torch.Tensor | None = None
        try:
            for index, (part, share) in enumerate(weighed):
                if self._host is not None:
                    self._host.hold(index < len(weighed) - 1)
                self._on_part(share)
                loss = loss_of(part) * (1.0 if self._is_sum else share)
                loss.backward()
                loss = loss.detach()
                total = loss if total is None else total + loss
        finally:
            self._on_part(1.0)
            if self._host is not None:
                self._host.hold(False)
        assert total is not None
        return total

    def _weighed(self, parts: Sequence[tuple[Any, int]]) -> list[tuple[Any, float]]:
        """Micro-batches and their shares of the batch; without those of weight 0.

        A mean over no tokens is NaN, and NaN times 0 is NaN.
        """
        counts = [float(samples) for _, samples in parts]
        weights = self._weights
        if weights is not None:
            by_user = [weights.of(part, f"a micro-batch of {n}") for part, n in parts]
            counts = by_user if any(by_user) else counts
        total = sum(counts)
        pairs = zip(parts, counts, strict=True)
        return [(part, count / total) for (part, _), count in pairs if count]

    def _learn(
        self,
        parts: Sequence[tuple[Any, int]],
        batch: Any,
        samples: int,
        error: BaseException,
    ) -> None:
        """Lowers the size cap after running out of memory."""
        size = parts[0][1]
        why_not = self._why_whole(size, batch, samples)
        if why_not:
            raise ConfigError(
                f"{size} samples do not fit the device ({error}), and {why_not}"
            ) from error
        count = len(parts) + max(1, len(parts) // 2)
        cap = min(-(-batch_length(batch) // count), size - 1)
        cap = max(cap, self._least_cap)
        logger.warning(
            "%d samples do not fit %s; it gets at most %d at once from now on (%s)",
            size,
            self._device,
            cap,
            str(error),  # its traceback would keep the attempt's tensors alive
        )
        self.max_samples = cap
        if self._host is not None:
            self._host.worker.max_samples = cap

    def _why_whole(self, size: int, batch: Any, samples: int) -> str:
        """Reason why ``size`` samples of a batch cannot be divided; "" if they can."""
        layers = sync_batchnorm_layers(self._model).values()
        if any(layer.spans_ranks for layer in layers):
            return (
                "a batch in micro-batches would have several statistics in its "
                "SyncBatchNorm layers; give each rank's limit as max_samples={rank: "
                "samples}, or a smaller batch_size"
            )
        length = batch_length(batch)
        if samples and length != samples:
            return (
                f"a batch of {samples} samples whose first tensor has {length} in "
                "dimension 0 cannot be divided; lower batch_size"
            )
        try:
            cut_batch(batch, 0, 1, length)
        except ConfigError as error:
            return f"its batch cannot be divided ({error}); lower batch_size"
        if size <= self._least_cap:
            return (
                f"fewer than {self._least_cap} at once are not possible: it has "
                "too little memory for this model"
            )
        return ""

    def _take_back(self, before: _Moment | None) -> None:
        """Restores the state before the attempt."""
        for parameter in self._model.parameters():
            parameter.grad = None
        if self._host is not None:
            self._host.rewind()
        if before is not None:
            before.restore()
        memory.empty_cache(self._device)


@final
class _Moment:
    """Random numbers and statistics at the start of a batch."""

    def __init__(self, device: torch.device, buffers: Sequence[torch.Tensor]) -> None:
        self._kept = [(b, b.detach().to("cpu", copy=True)) for b in buffers]
        self._random = [(d, random_state.state_of(d)) for d in {choice.CPU, device}]

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the saved state."""
        for buffer, value in self._kept:
            buffer.copy_(value)
        for device, state in self._random:
            random_state.restore(device, state)


def cut_batch(batch: Any, start: int, stop: int, length: int) -> Any:
    """Cuts samples ``start`` to ``stop`` from a batch of ``length``.

    Tensors are cut along dimension 0, and so are lists and tuples with one item per
    sample and no tensor. Single numbers, texts and 0-dimensional tensors belong to
    every sample.

    Raises:
        ConfigError: an item has another length, or cannot be cut.
    """

    def is_whole(item: Any) -> bool:
        is_rows = isinstance(item, (list, tuple)) and len(item) == length
        return is_rows and not any(
            isinstance(leaf, torch.Tensor) for leaf in tree_leaves(item)
        )

    def cut(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.dim():
            if len(item) != length:
                raise ConfigError(
                    f"expected every tensor to have {length} samples in dimension 0, "
                    f"got {list(item.shape)}"
                )
            return item[start:stop]
        if isinstance(item, (list, tuple)):
            return item[start:stop]
        if isinstance(item, Mapping):  # a mapping that is no pytree node
            same: Any = copy.copy(item)
            same.update(
                {key: cut_batch(item[key], start, stop, length) for key in item}
            )
            return same
        if item is None or isinstance(item, (torch.Tensor, str, bytes, int, float)):
            return item
        raise ConfigError(
            f"expected tensors in tuples, lists or dicts, got {type(item).__name__}"
        )

    return tree_map(cut, batch, is_leaf=is_whole)
