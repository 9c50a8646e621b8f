"""Handwritten digits: a small convolutional network with batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from benchmarks.convergence.tasks import Task

CHANNELS = (16, 32)
SIDE = 8
CLASSES = 10
HELD_OUT = 4
"""Every fourth image is evaluated on."""


@final
class Digits(Task):
    """scikit-learn's digits, 8 by 8; two convolutions with batch norm, a linear layer.

    Evaluated by the error rate on a quarter of the images, with running statistics.
    The replicas' channels lie side by side, and convolutions are grouped by replica.
    """

    name = "digits"

    def __init__(self, batch_size: int = 32) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        images = torch.tensor(found.images, dtype=torch.float32) / 16.0
        labels = torch.tensor(found.target)
        held_out = torch.arange(len(images)) % HELD_OUT == 0
        self.batch_size = batch_size
        self._train = images[~held_out], labels[~held_out]
        self._eval = images[held_out], labels[held_out]
        first, second = CHANNELS
        self.shapes = [
            (first, 1, 3, 3),
            (first,),
            (first,),
            (second, first, 3, 3),
            (second,),
            (second,),
            (second * (SIDE // 2) ** 2, CLASSES),
            (CLASSES,),
        ]
        self.buffer_size = 2 * sum(CHANNELS)

    @override
    def initial(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for index, shape in enumerate(self.shapes):
            if len(shape) == 1:
                parts.append(torch.full(shape, float(index in (1, 4))))
                continue
            inputs = shape[0] if len(shape) == 2 else shape[1] * 9
            values = torch.randn(shape, generator=generator) * inputs**-0.5
            parts.append(values.flatten())
        first, second = CHANNELS
        held = [torch.zeros(first), torch.ones(first)]
        held += [torch.zeros(second), torch.ones(second)]
        return torch.cat(parts), torch.cat(held)

    def stream(self, seed: int, batches: int) -> Tensor:
        """One permutation of the samples after another."""
        generator = torch.Generator().manual_seed(1_000_003 + seed)
        size, total = len(self._train[0]), batches * self.batch_size
        orders = [
            torch.randperm(size, generator=generator) for _ in range(0, total, size)
        ]
        return torch.cat(orders)[:total].view(batches, self.batch_size)

    @override
    def losses(
        self, parameters: Sequence[Tensor], buffers: Tensor, samples: Tensor
    ) -> Tensor:
        images, labels = self._train
        logits = self._logits(parameters, buffers, images[samples], training=True)
        total = F.cross_entropy(
            logits.flatten(0, 1), labels[samples].flatten(), reduction="sum"
        )
        return total / samples.shape[1]

    @torch.no_grad()
    def evaluate(self, parameters: Sequence[Tensor], buffers: Tensor) -> list[float]:
        """The error on held-out samples, in per cent."""
        images, labels = self._eval
        all_images = images.expand(len(buffers), *images.shape)
        logits = self._logits(parameters, buffers, all_images, training=False)
        wrong = (logits.argmax(-1) != labels).float()
        return [100.0 * float(share) for share in wrong.mean(1)]

    @staticmethod
    def _logits(
        parameters: Sequence[Tensor], buffers: Tensor, images: Tensor, training: bool
    ) -> Tensor:
        """Of shape (replicas, samples, classes)."""
        replicas, samples = images.shape[:2]
        hidden, start = images.transpose(0, 1), 0
        for layer, channels in enumerate(CHANNELS):
            kernel, scale, shift = parameters[3 * layer : 3 * layer + 3]
            hidden = F.conv2d(hidden, kernel.flatten(0, 1), padding=1, groups=replicas)
            mean = buffers[:, start : start + channels].flatten().clone()
            variance = buffers[:, start + channels : start + 2 * channels]
            variance = variance.flatten().clone()
            hidden = F.batch_norm(
                hidden, mean, variance, scale.flatten(), shift.flatten(), training
            )
            if training:
                buffers[:, start : start + channels] = mean.view(replicas, -1)
                start += channels
                buffers[:, start : start + channels] = variance.view(replicas, -1)
                start += channels
            else:
                start += 2 * channels
            hidden = torch.relu(hidden)
        hidden = F.max_pool2d(hidden, 2)
        flat = hidden.reshape(samples, replicas, -1).transpose(0, 1)
        weight, bias = parameters[-2:]
        return torch.baddbmm(bias[:, None], flat, weight)
