"""Gradients summed over a window, for one common optimizer step at its end.

A rank adds up the gradients of its batches, each times its samples; the ranks sum these
sums and their samples, and all ranks take ΣG_r / Σ|S_r|, the gradient of the mean over
all samples of the window, whatever each rank's part of it. Between the batches
``p.grad`` is None, so that the loop's own ``optimizer.step()`` moves nothing. Clipping
comes after the reduction.

The message carries a flag per parameter, so that one that no rank used keeps
``grad=None``, and the rank's samples. What a rank added up is kept until it adds to the
next window, so a reduction that fails can be redone (:meth:`GradientWindow.connect`).
A rank whose sums contain NaN or Inf sends zeros, and no samples.
Cost: two model copies beside the gradients, and one more where ranks sum in shared
memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import nn

from elche.comm.tensors.flat import shaped, wire_dtype
from elche.comm.tensors.nan_check import all_finite
from elche.comm.transport.host_exchange import open_by_hosts
from elche.comm.transport.process_group import Group
from elche.errors import ConfigError
from elche.torch_internals.held import foreach_add_, foreach_copy_, foreach_zero_

WHAT = "reducing the gradients of a window"


class GradientWindow:
    """Sums the gradients of one model over windows and ranks; made with all of them.

    Args:
        parameters: the trainable parameters, each once, in the same order on every
            rank.
        group: the process group.

    Attributes:
        group: the one that it sends through.

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
            torch.zeros_like(p, dtype=self._dtype, requires_grad=False)
            for p in parameters
        ]
        self._used = [False] * len(self._parameters)
        self._samples = 0.0
        self._is_reduced = False
        self.connect(group)

    @property
    def extra_bytes(self) -> int:
        """Memory of sums, message and result."""
        copies = 3 if self._message.keeps_contribution else 2
        return copies * self._numel * self._dtype.itemsize

    @property
    def samples(self) -> float:
        """This rank's samples in the window so far."""
        return 0.0 if self._is_reduced else self._samples

    @property
    def is_finite(self) -> bool:
        """True if this rank's summed gradients are finite; waits for the device."""
        return self._is_reduced or all_finite(self._sums)

    def connect(self, group: Group) -> None:
        """Sends through this group from now on; with all its ranks.

        What was added up stays, so a reduction that failed can be redone.
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
            samples: what ``p.grad`` is a mean over; 0 drops it.
            is_whole: this is all of the batch (or the last backward pass through it):
                its samples count now.

        Raises:
            ConfigError: the samples are no such number.
        """
        if not (math.isfinite(samples) and samples >= 0):
            raise ConfigError(f"expected a number of samples from 0 on, got {samples}")
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
        """Ends the window on this rank: sends what was added up.

        Args:
            counts: False: it is no contribution (see :attr:`is_finite`): zeros are sent
                in its place.
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
        """Waits for all ranks, and gives every ``p.grad`` the mean over the window.

        It is None where no rank had a gradient, and overwritten by the next reduction.
        The caller clips, steps, and calls :meth:`clear`.

        Returns:
            The samples of all ranks; 0.0 leaves every ``p.grad`` None.

        Raises:
            CommunicationError: it failed; nothing has changed on this rank.
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
        """The step that this window ends with was taken from another rank."""
        self._is_reduced = True
        self.clear()

    def clear(self) -> None:
        """Sets every ``p.grad`` to None, so that the loop's own step moves nothing."""
        for parameter in self._parameters:
            parameter.grad = None

    def _forget(self) -> None:
        """A window whose reduction is through makes room for the next."""
        foreach_zero_(self._sums)
        self._used = [False] * len(self._parameters)
        self._samples = 0.0
        self._is_reduced = False


def _lying_as(parameter: nn.Parameter, mean: torch.Tensor) -> torch.Tensor:
    """A gradient in the memory format of its parameter: fused optimizers rely on it."""
    if mean.is_complex() and not parameter.is_complex():
        mean = mean.real.contiguous()  # complex parameters are in the same message
    if parameter.is_contiguous():
        return mean.to(parameter)
    return torch.empty_like(parameter).copy_(mean)
