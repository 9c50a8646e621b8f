"""One process' copy of a stream, read forward and by position.

See `elche.runtime.data.stream_data` for what is promised.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from elche.comm.transport.process_group import Group
from elche.errors import ConfigError, MismatchError
from elche.runtime.data.fingerprint import fingerprint
from elche.runtime.data.sample_seeds import (
    position_seed,
    seed_generators,
    untraced_generators,
)
from elche.torch_internals.batches import as_if_alone

HEAD_SAMPLES = 2
"""Samples at the beginning of an epoch that are compared between processes."""

logger = logging.getLogger(__name__)


class Stamp(NamedTuple):
    """Description of the stream that a worker process reads.

    Attributes:
        fingerprint: of the epoch's first samples, as that process got them.
        has_more: whether the stream went on after the epoch's last position.
    """

    fingerprint: int
    has_more: bool


class Stamped(NamedTuple):
    """Data, and what the process that loaded it says of its stream.

    A plain tuple on its way between processes, which is pinned like any other.
    """

    data: Any
    stamp: Stamp


class StreamReader:
    """Reads one stream forward, in one process; other processes get a copy.

    Args:
        stream: the user's data set.
        length: positions of an epoch.
        loads_here: the training process itself loads, not workers.
        seed: of the global generators; None leaves them alone.
    """

    def __init__(
        self, stream: Any, length: int, loads_here: bool, seed: int | None
    ) -> None:
        self.stream = stream
        self.length = length
        self.seed = seed
        self.group: Group | None = None
        self._loads_here = loads_here
        self._agreed: int | None = None
        self._has_warned = False
        self._unread: tuple[int, Any] = -1, stream
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """State for another process: no iterator, no group."""
        return {
            "stream": self.stream,
            "length": self.length,
            "loads_here": self._loads_here,
            "seed": self.seed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def name(self) -> str:
        """The user's name for the stream."""
        return type(self.stream).__name__

    def begin_epoch(self, epoch: int) -> None:
        """Opens the stream for an epoch, and compares the ranks' first samples."""
        with self._reading():
            self._open(epoch)
        self._agreed = self._fingerprint
        if not self._loads_here:
            self._forget()
        if self.group is not None:
            self._compare(self.group, epoch)

    def read(self, epoch: int, positions: Sequence[int]) -> Stamped:
        """The samples at the positions, which only ascend within an epoch."""
        items = []
        with self._reading():
            for position in positions:
                if epoch != self._epoch or position < self._next:
                    self._open(epoch)
                while self._next < position:
                    self._advance()
                items.append(self._advance())
            if self._next == self.length:
                self._look_beyond()
        return Stamped(items, Stamp(self._fingerprint, self._has_more))

    def check(self, stamp: Stamp) -> None:
        """Refuses samples of another stream; warns of more than an epoch's."""
        if stamp.fingerprint != self._agreed:
            raise MismatchError(
                f"a process that loads read another stream {self.name} than the one "
                "with which the epoch began: its first samples are others. Seed the "
                "stream's own generators alike in every process, do not divide it in "
                "worker_init_fn, and note that persistent workers keep the copy of "
                "the data set that they began with"
            )
        if stamp.has_more and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the stream %s yields more than the %d samples of an epoch; the rest "
                "is left",
                self.name,
                self.length,
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Around everything that runs the user's stream."""
        with contextlib.ExitStack() as stack:
            if self.seed is not None:
                stack.enter_context(untraced_generators())
            stack.enter_context(as_if_alone())
            yield

    def _forget(self) -> None:
        """Is nowhere in the stream, and lets go of what it holds."""
        self._iterator: Iterator[Any] | None = None
        self._head: deque[Any] = deque()
        self._epoch = -1
        self._next = self._pulled = 0
        self._fingerprint = 0
        self._has_more = False

    def _open(self, epoch: int) -> None:
        """Begins an epoch's stream, and looks at its first samples.

        Of a copy, where the same epoch may begin more often or elsewhere too: some
        streams count their epochs in ``__iter__``, and must begin alike each time.
        """
        is_again = epoch == self._unread[0]
        if not is_again:
            self._unread = epoch, copy.copy(self.stream)
        stream = self.stream
        if is_again or not self._loads_here:
            stream = copy.copy(self._unread[1])
        self._forget()
        self._epoch = epoch
        self._seed(0)
        self._iterator = iter(stream)
        for _ in range(min(HEAD_SAMPLES, self.length)):
            self._head.append(self._pull())
        self._fingerprint = fingerprint(list(self._head))

    def _advance(self) -> Any:
        """The next item."""
        item = self._head.popleft() if self._head else self._pull()
        self._next += 1
        return item

    def _pull(self) -> Any:
        """Takes an item from the stream, drawn with its position's seed."""
        assert self._iterator is not None
        self._seed(self._pulled)
        try:
            item = next(self._iterator)
        except StopIteration:
            ended_after = self._pulled
            self._forget()
            raise ConfigError(
                f"the stream {self.name} ended after {ended_after} of the "
                f"{self.length} samples that an epoch is to have (samples_per_epoch, "
                "or its len()); say how many it yields. elche divides a stream "
                "itself: one that divides itself among ranks or in worker_init_fn "
                "must yield everything in every process"
            ) from None
        self._pulled += 1
        return item

    def _seed(self, position: int) -> None:
        if self.seed is not None:
            seed_generators(position_seed(self.seed, self._epoch, position))

    def _look_beyond(self) -> None:
        """Looks for a sample beyond the end; its errors belong to no epoch."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            with contextlib.suppress(Exception):
                next(iterator)
                self._has_more = True

    def _compare(self, group: Group, epoch: int) -> None:
        seen = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
        assert self._agreed is not None
        seen[group.rank] = self._agreed
        group.all_reduce(seen, "comparing the streams of an epoch")
        others = [rank for rank, one in enumerate(seen.tolist()) if one != int(seen[0])]
        if others:
            raise MismatchError(
                f"the stream {self.name} is not the same on every rank: the first "
                f"samples of epoch {epoch} on ranks {others[:8]} are not those of "
                "rank 0. Every rank must read the same samples in the same order, "
                "which elche then divides: seed the stream's own generators alike on "
                "every rank, and do not divide it by rank"
            )
