"""A model in fragments that are synchronised in turn, each from its own base.

Streaming DiLoCo (arXiv:2501.18512) lets every synchronisation move one of N fragments
of the model, so that the most that travels at once falls N-fold, and a fragment is
reduced as often as the whole model would be in windows N times as long. Between two
turns a fragment drifts through all the windows between; what it weighs then is what
this rank trained in all of them. At an epoch's end all fragments are synchronised.

The paper deals layers out to fragments at a stride, and blends parameters; here a
fragment is consecutive parameters, cut so that the largest is as small as can be, and
a mean is added as a correction, as everywhere.

A window counts as committed when its turn's fragment is reduced; its contribution to
the others is still this rank's own. So *every position exactly once* holds only while
nobody dies and no rank's parameters become no numbers: such a rank takes with it what
its other fragments have not brought in yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from elche.coordination.reductions import drift_weight
from elche.errors import ConfigError


def fragments_of(
    parameters: Sequence[nn.Parameter], count: int
) -> list[list[nn.Parameter]]:
    """Consecutive parameters, cut so that the largest fragment is the least.

    Args:
        parameters: the trained parameters, in the same order on every rank.
        count: of the fragments.

    Raises:
        ConfigError: there are fewer parameters than fragments.
    """
    if count > max(1, len(parameters)):
        raise ConfigError(
            f"expected at most a fragment per trained parameter ({len(parameters)}), "
            f"got fragments={count}"
        )
    sizes = [parameter.numel() for parameter in parameters]
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(sizes, middle, 1)) <= count:
            high = middle
        else:
            low = middle + 1
    cuts = _cuts(sizes, low, count)
    edges = [*cuts, len(sizes)]
    return [list(parameters[first:last]) for first, last in pairwise(edges)]


def _cuts(sizes: Sequence[int], limit: int, least: int) -> list[int]:
    """Where parts of at most ``limit`` begin; at least so many, none of them empty."""
    cuts, held = [0], 0
    for index, size in enumerate(sizes):
        owed = least - len(cuts)
        if index and (held + size > limit or len(sizes) - index <= owed):
            cuts.append(index)
            held = 0
        held += size
    return cuts


class DriftSamples:
    """What this rank trained on since each fragment was synchronised last.

    Args:
        kind: how drifts are weighted; see `drift_weight`.
        fragments: how many there are.
    """

    def __init__(self, kind: str, fragments: int) -> None:
        self.fragments = fragments
        self._kind = kind
        self._samples = [0.0] * fragments

    def add(self, samples: float) -> None:
        """A window ended in which this rank trained on so many, or so much weight."""
        self._samples = [held + samples for held in self._samples]

    def weights(self) -> tuple[float, ...]:
        """What each fragment's drift weighs now, relative to other ranks'."""
        return tuple(drift_weight(self._kind, held) for held in self._samples)

    def synchronised(self, fragment: int | None) -> None:
        """A fragment's drift has been sent; None for all of them."""
        for index in range(len(self._samples)):
            if fragment is None or fragment == index:
                self._samples[index] = 0.0
