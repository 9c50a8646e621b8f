"""Expected gradients per parameter and backward pass, for bucket readiness.

A parameter usually gets one gradient in a pass. It gets several where it is used in
several segments of reentrant activation checkpointing, each of which accumulates for
itself, and none where a branch was not taken. A bucket that goes before the last one
has come lacks it. The last gradient of a layer that is used again and again comes near
the pass's end, so waiting for that costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from elche.errors import ConfigError


@final
class GradientCounts:
    """Counts the gradients of one pass after the other.

    In the first pass gradients may come after their bucket has gone, which is then sent
    again; in later ones it waits until the end for parameters that got several.

    Args:
        names: of the parameters, for people.

    Attributes:
        late: parameters that got one in this pass after their bucket had gone.
        undefined: parameters that backward has come to without one in this pass.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._seen: dict[int, int] = {}
        self._several: frozenset[int] = frozenset()
        self.late: set[int] = set()
        self.undefined: set[int] = set()

    @property
    def came(self) -> dict[int, int]:
        """Number of gradients of each parameter in this pass, in order of the first."""
        return self._seen

    def begin(self) -> None:
        """A pass begins."""
        self.undefined.clear()
        self.begin_again()

    def begin_again(self) -> None:
        """All gradients of a pass will come once more."""
        self._seen, self.late = {}, set()

    def take(self, index: int, *, is_pending: bool, is_sent: bool) -> bool:
        """Takes note of a gradient.

        Args:
            index: of the parameter.
            is_pending: its bucket waits for it.
            is_sent: its bucket has gone.

        Returns:
            Whether the bucket need not wait for this parameter any more.
        """
        self._seen[index] = self._seen.get(index, 0) + 1
        if is_pending:
            return index not in self._several
        if is_sent:
            self.late.add(index)
        return True

    def learn(self) -> None:
        """The first pass has ended: what got several gradients may in later ones."""
        self._several = frozenset(i for i, times in self._seen.items() if times > 1)
        self.late.clear()

    def end(self) -> None:
        """After a pass that has been completed.

        Raises:
            ConfigError: gradients came that the reduction lacks.
        """
        if self.late:
            index = min(self.late)
            raise ConfigError(
                f"{self._names[index]} got {self._seen[index]} gradients in this "
                "backward pass and at most one in the first, the others too late for "
                "the reduction; activation checkpointing needs use_reentrant=False "
                "where a layer is used once in some batches and several times in others"
            )
