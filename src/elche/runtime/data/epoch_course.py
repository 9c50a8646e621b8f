"""An epoch from its first batch to its last, in one part or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack
import torch

from elche.coordination.accounts.batch_ranges import (
    BatchSizes,
    Range,
    joined,
    without,
)
from elche.coordination.accounts.epoch_parts import EpochRest, PartRanges
from elche.coordination.protocol.instructions import EndEpoch
from elche.errors import ConfigError
from elche.runtime.data.positions import EpochPositions, packed_keys

FAR_AHEAD = (
    "no checkpoint can be made: batches fetched before the last one still have no "
    "backward pass; train on each batch before many others are fetched"
)
STATE_KEYS = {
    *("number", "sizes", "left", "keys", "is_packed", "samples_before", "most"),
    "steps",
}


def ranges_of(sizes: BatchSizes, batches: Sequence[int]) -> tuple[Range, ...]:
    """Position ranges of these batches."""
    return tuple((sizes.position_of(n), sizes.position_of(n + 1)) for n in batches)


class EpochCourse:
    """Finished and remaining parts of an epoch: the same on all ranks.

    Args:
        number: number of the epoch in the whole run.
        keys: dataset key of every position; arbitrary for finished ones.
        sizes: sizes of the user's global batches.
        left: positions to train on.
        samples_before: samples of the run at the epoch's start, by this process's
            count.
        most: limit on the batches drawn; None for a whole epoch.

    Attributes:
        ends: `EndEpoch` of each part so far.
    """

    def __init__(
        self,
        number: int,
        keys: torch.Tensor | Sequence[Any],
        sizes: BatchSizes,
        left: PartRanges,
        samples_before: int,
        most: int | None,
    ) -> None:
        self.number = number
        self.sizes = sizes
        self.samples_before = samples_before
        self.ends: list[EndEpoch] = []
        self._keys = keys
        self._most = most
        self._rest = EpochRest(sizes, left)
        self._is_whole = left.num_positions == sizes.num_samples
        self._open: tuple[Range, ...] = ()

    @property
    def is_over(self) -> bool:
        """True if no positions are left."""
        return not self._rest.left.ranges

    @property
    def is_cut(self) -> bool:
        """True if some positions were done before this part."""
        return not self._is_whole

    @property
    def part_sizes(self) -> BatchSizes:
        """Global batches of the part that is left."""
        return self._rest.part_sizes

    def positions(self, seed: int | None) -> EpochPositions:
        """Makes the remaining positions, for a loader."""
        return EpochPositions(
            self._keys,
            self.part_sizes,
            self.number,
            seed,
            self._most,
            None if self._is_whole else self._rest.left,
        )

    @property
    def open_samples(self) -> int:
        """Samples of batches with a pending backward pass: not in the model yet."""
        return sum(stop - start for start, stop in self._open)

    def ended(self, end: EndEpoch, open_batch: Sequence[Range] = ()) -> None:
        """Records the end of a part, and its rest; ``open_batch`` as in `done`."""
        self.ends.append(end)
        rest = self._rest.after(end)
        self.done(end.left, open_batch)
        self._rest = rest

    def done(self, left: Sequence[Range], open_batch: Sequence[Range] = ()) -> None:
        """Marks all of the part as done, except these ranges.

        ``open_batch``: ranges of batches with a pending backward pass. This process
        still runs that pass; a run resumed from the state saved now trains on them
        again. Positions of a dead rank among them remain.
        """
        part = self._rest.left
        self._open = part.origins_of(without(open_batch, left)).ranges
        self._rest = replace(self._rest, left=part.origins_of(left))
        self._is_whole = False

    def state_dict(self, samples: int) -> dict[str, Any]:
        """State of the epoch's rest, at ``samples`` trained samples of the run."""
        keys, steps = self._keys, self._rest.steps
        left = joined([*self._open, *self._rest.left.ranges])
        if isinstance(keys, torch.Tensor):
            pieces = [keys[start:stop] for start, stop in left]
            held = torch.cat(pieces) if pieces else keys[:0].clone()
            is_packed = False
        else:
            held, kind = packed_keys([k for a, b in left for k in keys[a:b]])
            is_packed = bool(kind)
        return {
            "number": self.number,
            "sizes": [list(run) for run in self.sizes.runs],
            "left": [list(part) for part in left],
            "keys": held,
            "is_packed": is_packed,
            "samples_before": self.samples_before - samples + self.open_samples,
            "most": self._most,
            "steps": steps and steps + bool(self._open),
        }

    @staticmethod
    def from_state(state: dict[str, Any]) -> EpochCourse:
        """Restores a course from :meth:`state_dict`.

        Raises:
            ConfigError: another version of elche wrote the state.
        """
        if set(state) != STATE_KEYS:
            raise ConfigError(
                f"expected an epoch with entries {sorted(STATE_KEYS)}, got "
                f"{sorted(state)}: another version of elche wrote the checkpoint"
            )
        sizes = BatchSizes(tuple((int(a), int(b)) for a, b in state["sizes"]))
        left = PartRanges(tuple((int(a), int(b)) for a, b in state["left"]))
        kept = state["keys"]
        keys: Any = torch.zeros(sizes.num_samples, dtype=torch.int64, device="cpu")
        if state["is_packed"]:
            raw = kept.numpy().tobytes()
            kept = list(msgpack.unpackb(raw, use_list=False)) if raw else []
            keys = [None] * sizes.num_samples
        at = 0
        for start, stop in left.ranges:
            keys[start:stop] = kept[at : at + stop - start]
            at += stop - start
        course = EpochCourse(
            state["number"], keys, sizes, left, state["samples_before"], state["most"]
        )
        course._rest = replace(course._rest, steps=state["steps"])
        return course
