"""Reduced buckets published as ``p.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from elche.comm.gradients.buckets.bucket import Bucket
from elche.comm.gradients.buckets.bucket_contract import Closed, Reduced


@final
class HandedOut:
    """Gradients handed out, and what they took the place of.

    Args:
        reduced: records them.
        as_views: ``p.grad`` becomes a view of the reduced bucket; else the sum is
            copied into the gradient's own memory.
    """

    def __init__(self, reduced: Reduced, *, as_views: bool) -> None:
        self._as_views = as_views
        self._record = reduced
        self._given = reduced.given
        self._kept: list[torch.Tensor | None] = []

    def is_given(self, parameter: nn.Parameter) -> bool:
        """True if ``p.grad`` is what the last pass handed out."""
        given = self._given.get(id(parameter))
        return given is not None and given() is parameter.grad is not None

    def let_go(self) -> None:
        """All ranks have what was handed out last: what it took the place of may go."""
        self._kept = []

    @torch.no_grad()
    def hand_out(self, buckets: Sequence[Bucket], closed: Closed) -> None:
        """Gives every parameter that any rank used its reduced gradient.

        A rank whose gradients weigh nothing drops those that no other rank has.
        """
        self._record.passes += 1
        kept: list[torch.Tensor | None] = []
        replaces_all = self._as_views and closed.source is not None
        for bucket in buckets:
            if closed.factor != 1.0:
                bucket.rescale(closed.factor)
            keeps = self._as_views and not bucket.keeps_contribution
            summed = bucket.summed
            if replaces_all and not bucket.missing:  # the usual case, and quick
                totals = summed[: len(bucket.parameters)]
                for parameter, total in zip(bucket.parameters, totals, strict=True):
                    if keeps:
                        kept.append(parameter.grad)
                    parameter.grad = total
                    self._given[id(parameter)] = weakref.ref(total)
                continue
            used = bucket.used()
            for index, parameter in enumerate(bucket.parameters):
                own = parameter.grad
                if keeps:
                    kept.append(own)
                if used[index] and closed.source is not None:
                    parameter.grad = self._reduced(parameter, summed[index])
                elif not self.is_given(parameter):
                    parameter.grad = None
                self._given.pop(id(parameter), None)
                if parameter.grad is not None:
                    self._given[id(parameter)] = weakref.ref(parameter.grad)
        self._kept = kept

    def _reduced(self, parameter: nn.Parameter, total: torch.Tensor) -> torch.Tensor:
        if self._as_views:
            return total
        own = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
        return own.copy_(total)
