"""Gradients of all stages together: their norm, and whether they are finite."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import nn

from elche.pipeline.crew import Crew


def clip_norm(
    parameters: Iterable[nn.Parameter], copies: Set[int], max_norm: float, crew: Crew
) -> float:
    """Scales this rank's gradients so that the norm over all ranks is not larger.

    Args:
        parameters: of this rank.
        copies: ids of those that another rank counts: copies of shared parameters.
        max_norm: 2-norm.
        crew: all ranks, which call this together.

    Returns:
        The norm before, on every rank.
    """
    mine = [one for one in parameters if one.grad is not None]
    squares = sum(
        float(one.grad.detach().double().norm()) ** 2
        for one in mine
        if one.grad is not None and id(one) not in copies
    )
    norm = sum(crew.exchange(squares, "the norm of the gradients")) ** 0.5
    scale = max_norm / (norm + 1e-6)
    if scale < 1.0:
        for one in mine:
            if one.grad is not None:
                one.grad.mul_(scale)
    return float(norm)


def unscale(parameters: Iterable[nn.Parameter], loss_scale: float, crew: Crew) -> bool:
    """Divides this rank's gradients; whether those of all ranks are finite then."""
    finite = True
    for one in parameters:
        if one.grad is not None:
            one.grad.div_(loss_scale)
            finite = finite and bool(one.grad.isfinite().all())
    return all(crew.exchange(finite, "whether the gradients are finite"))
