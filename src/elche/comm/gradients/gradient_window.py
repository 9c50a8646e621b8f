"""Gradients summed over a window, for one common optimizer step at its end.

A rank adds up the gradients of its batches, each times its samples. The ranks reduce
these sums and their samples to ΣG_r / Σ|S_r|, the gradient of the mean over all samples
of the window, whatever each rank's share. Between the batches ``p.grad`` is None, so
that the loop's own ``optimizer.step()`` changes nothing. Clip after the reduction.

The message holds the gradients, a flag per parameter, so that a parameter that no rank
used keeps ``grad=None``, and the rank's samples. A rank keeps its local sums until it
adds to the next window, so that a failed reduction can be repeated
(:meth:`GradientWindow.connect`). A rank whose sums contain NaN or Inf sends zeros and
no samples.
Cost: two model copies in addition to the gradients; in shared memory, three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import nn

from elche.comm.tensors.flat import all_finite, shaped, wire_dtype
from elche.comm.transport.host_exchange import open_by_hosts
from elche.comm.transport.process_group import Group
from elche.errors import ConfigError
from elche.torch_internals.held import foreach_add_, foreach_copy_, foreach_zero_

WHAT = "reducing the gradients of a window"


class GradientWindow:
    """Sums gradients of a model over windows and ranks; constructed collectively.

    Args:
        parameters: trainable parameters, each once, in the same order on every rank.
        group: process group of all ranks.

    Attributes:
        group: current process group.

    Raises:
        ConfigError: there is no parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        if not parameters:
            raise ConfigError("the model has no parameter that requires a gradient")
        self._parameters = list(parameters)
        kinds = (wire_dtype(parameter.dtype) for parameter in parameters)
        self._dtype = reduce(torch.promote_types, kinds)
        self._numel = sum(parameter.numel() for parameter in parameters)
        self._sums = [
            torch.empty_like(p, dtype=self._dtype, requires_grad=False)
            for p in parameters
        ]
        self._forget()
        self.connect(group)

    @property
    def extra_bytes(self) -> int:
        """Bytes of sums, message and result, and its share of shared sums."""
        copies = 3 if self._message.keeps_contribution else 2
        own_bytes = copies * self._numel * self._dtype.itemsize
        return own_bytes + self._message.extra_bytes

    @property
    def samples(self) -> float:
        """This rank's samples in the window so far."""
        return 0.0 if self._is_reduced else self._samples

    @property
    def is_finite(self) -> bool:
        """True if this rank's summed gradients are finite; synchronizes the device."""
        return self._is_reduced or all_finite(self._sums)

    def connect(self, group: Group) -> None:
        """Switches to a group; a collective call in it.

        Local sums are kept, so that a failed reduction can be repeated.
        """
        self.group = group
        # Gradients, a flag per parameter, samples.
        numel = self._numel + len(self._parameters) + 1
        cpu = torch.device("cpu")
        self._message = open_by_hosts(group, numel, self._dtype, cpu)

    @torch.no_grad()
    def add(self, samples: float, *, is_whole: bool = True) -> None:
        """Adds the gradient of a batch, and sets every ``p.grad`` to None.

        Args:
            samples: number of samples that ``p.grad`` is a mean over; 0 drops it.
            is_whole: True to count the samples now: this is the only or the last
                backward pass through the batch.

        Raises:
            ConfigError: ``samples`` is negative or not finite.
        """
        if not (math.isfinite(samples) and samples >= 0):
            raise ConfigError(f"expected at least 0 samples, got {samples}")
        if self._is_reduced:
            self._forget()
        sums, gradients = [], []
        for index, parameter in enumerate(self._parameters if samples else ()):
            if parameter.grad is not None:
                self._used[index] = True
                sums.append(self._sums[index])
                gradients.append(parameter.grad)
        if sums:
            foreach_add_(sums, gradients, alpha=samples)
        if is_whole:
            self._samples += samples
        self.clear()

    @torch.no_grad()
    def begin(self, *, counts: bool = True) -> None:
        """Ends the window on this rank and sends its sums.

        Args:
            counts: False to send zeros instead (see :attr:`is_finite`).
        """
        if self._is_reduced:
            self._forget()
        message = self._message.contribution(0)
        if not counts:
            message.zero_()
        else:
            foreach_copy_(shaped(message[: self._numel], self._sums), self._sums)
            used = torch.tensor(self._used, device="cpu")
            message[self._numel : -1] = used.to(self._dtype)
            message[-1] = self._samples
        self._message.begin(0)

    @torch.no_grad()
    def finish(self) -> float:
        """Waits for all ranks and sets every ``p.grad`` to the mean over the window.

        It is None if no rank had a gradient; the next reduction overwrites it. The
        caller clips, steps, and calls :meth:`clear`.

        Returns:
            The total samples of all ranks; 0.0 leaves every ``p.grad`` None.

        Raises:
            CommunicationError: the reduction failed; this rank is unchanged.
        """
        summed = self._message.finish(WHAT)
        samples = float(summed[-1].real)
        self._is_reduced = True
        self.clear()
        if samples > 0:
            means = shaped(summed[: self._numel].div_(samples), self._sums)
            flags = summed[self._numel : -1].tolist()
            for parameter, mean, flag in zip(
                self._parameters, means, flags, strict=True
            ):
                if flag != 0:
                    parameter.grad = _lying_as(parameter, mean)
        return samples

    @property
    def is_summed(self) -> bool:
        """True if :meth:`finish` would return at once, and not raise."""
        return self._message.has_sum

    def skip(self) -> None:
        """Discards the window, as its step was copied from another rank."""
        self._is_reduced = True
        self.clear()

    def clear(self) -> None:
        """Sets every ``p.grad`` to None, so that the loop's step changes nothing."""
        for parameter in self._parameters:
            parameter.grad = None

    def _forget(self) -> None:
        """Resets the sums for the next window."""
        foreach_zero_(self._sums)
        self._used = [False] * len(self._parameters)
        self._samples = 0.0
        self._is_reduced = False


def _lying_as(parameter: nn.Parameter, mean: torch.Tensor) -> torch.Tensor:
    """Converts a gradient to its parameter's format, as fused optimizers require."""
    if mean.is_complex() and not parameter.is_complex():
        mean = mean.real.contiguous()  # complex parameters are in the same message
    if parameter.is_contiguous():
        return mean.to(parameter)
    return torch.empty_like(parameter).copy_(mean)
