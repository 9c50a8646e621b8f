"""Expected gradients per parameter and backward pass, for bucket readiness.

A parameter usually gets one gradient in a pass. It gets several where it is used in
several segments of reentrant activation checkpointing, each of which accumulates for
itself, and none where a branch was not taken. A bucket that goes before the last one
has come lacks it. The last gradient of a layer that is used again and again comes near
the pass's end, so waiting for that costs little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import final

from elche.errors import ConfigError


@final
class GradientCounts:
    """Counts the gradients of one pass after the other.

    Args:
        names: of the parameters, for people.
        is_static: every pass is like the first one, which only counts; another one is
            an error.
        learns: in the first pass gradients may come after their bucket has gone, which
            is then sent again; in later ones it waits until the end.
        has_zeros: a parameter that backward comes to without a gradient has one of
            zeros; in a static graph if the first pass had one for it.

    Attributes:
        late: parameters that got one in this pass after their bucket had gone.
        undefined: parameters that backward has come to without one in this pass.
    """

    def __init__(
        self, names: Sequence[str], *, is_static: bool, learns: bool, has_zeros: bool
    ) -> None:
        self._names = names
        self._is_static = is_static
        self._learns = learns
        self._has_zeros = has_zeros
        self._seen: dict[int, int] = {}
        self._expected: dict[int, int] | None = None
        self._several: frozenset[int] = frozenset()
        self._unused: frozenset[int] | None = None
        self._problem = ""
        self._never_defined: frozenset[int] = frozenset()
        self.late: set[int] = set()
        self.undefined: set[int] = set()

    @property
    def only_counts(self) -> bool:
        """Whether nothing may be sent before the pass has ended."""
        return self._is_static and self._expected is None

    @property
    def came(self) -> dict[int, int]:
        """How many gradients each parameter got in this pass, in order of the first."""
        return self._seen

    def make_static(self) -> None:
        """Takes every pass for one like the first, which has not been yet."""
        self._is_static = True

    def expect_unused(self, indices: frozenset[int]) -> None:
        """Says which parameters get no gradient from one of the pass's forwards."""
        self._unused = indices if self._unused is None else self._unused & indices

    def begin(self) -> None:
        """A pass begins."""
        self.undefined.clear()
        self.begin_again()

    def begin_again(self) -> None:
        """All gradients of a pass will come once more."""
        self._seen, self._problem, self.late = {}, "", set()

    def awaits(self, index: int) -> bool:
        """Whether a parameter gets a gradient in this pass."""
        if self._expected is not None:
            return index in self._expected
        return self._unused is None or index not in self._unused

    def is_zero(self, index: int) -> bool:
        """Whether a parameter that is undefined has a gradient of zeros."""
        is_known = not self.only_counts and index not in self._never_defined
        return self._has_zeros and is_known

    def take(self, index: int, *, is_pending: bool, is_sent: bool) -> bool:
        """Takes note of a gradient.

        Args:
            index: of the parameter.
            is_pending: its bucket waits for it.
            is_sent: its bucket has gone.

        Returns:
            Whether the bucket need not wait for this parameter any more.
        """
        seen = self._seen[index] = self._seen.get(index, 0) + 1
        if self._is_static:
            return self._expected is not None and seen >= self._expected.get(index, 0)
        if is_pending:
            return index not in self._several
        if not self._learns:
            self._complain(
                f"{self._names[index]}: a gradient came twice in one backward "
                "pass, or to a parameter that find_unused_parameters had not "
                "found in the graph, and too late for the reduction; activation "
                "checkpointing needs use_reentrant=False (or static_graph=True of "
                "a DistributedDataParallel)"
            )
        elif is_sent:
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
        self._unused = None
        if self.only_counts:
            self._never_defined = frozenset(self.undefined)
        if self._is_static and self._seen:
            self._compare()
        for index in sorted(self.late):
            self._complain(
                f"{self._names[index]} got {self._seen[index]} gradients in this "
                "backward pass and at most one in the first, the others too late for "
                "the reduction; activation checkpointing needs use_reentrant=False "
                "where a layer is used once in some batches and several times in others"
            )
        if self._problem:
            raise ConfigError(self._problem)

    def _compare(self) -> None:
        if self._expected is None:
            self._expected = dict(self._seen)
            return
        for index in _sorted_union(self._seen, self._expected):
            now, first = self._seen.get(index, 0), self._expected.get(index, 0)
            if now != first:
                self._complain(
                    f"static_graph=True, but {self._names[index]} got {now} "
                    f"gradients in this backward and {first} in the first one"
                )

    def _complain(self, problem: str) -> None:
        self._problem = self._problem or problem


def _sorted_union(one: Collection[int], other: Iterable[int]) -> list[int]:
    return sorted({*one, *other})
