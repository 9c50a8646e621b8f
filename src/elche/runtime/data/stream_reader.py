"""One process' copy of a stream, read forward and by position.

See `elche.runtime.data.stream_data` for its guarantees.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from elche.comm.transport.process_group import Group
from elche.errors import ConfigError, MismatchError
from elche.runtime.data.seeds import (
    position_seed,
    seed_generators,
    untraced_generators,
)
from elche.torch_internals.batches import as_if_alone

HEAD_SAMPLES = 2
"""Samples at the beginning of an epoch that are compared between processes."""
SEED_BITS = 62
MOST_VALUES = 1024
"""Most values read of a large tensor or text, spread over it."""
MOST_DEPTH = 8
DIGEST_BYTES = 7

logger = logging.getLogger(__name__)


class ForwardingDataset(Dataset[Any]):
    """A data set that forwards attributes to another one.

    Args:
        held: the other data set, or its reader; pickled in place of this.
    """

    def __init__(self, held: Any) -> None:
        object.__setattr__(self, "_elche_held", held)

    def _elche_target(self) -> Any:
        return self._elche_held

    def __getattr__(self, name: str) -> Any:
        if name == "_elche_held":
            raise AttributeError(name)
        return getattr(self._elche_target(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._elche_target(), name, value)

    def __reduce__(self) -> Any:
        return _forwarding, (type(self), self._elche_held)


def _forwarding(kind: type[ForwardingDataset], held: Any) -> ForwardingDataset:
    made = kind.__new__(kind)
    ForwardingDataset.__init__(made, held)
    return made


class Stamp(NamedTuple):
    """Description of the stream that a worker process reads.

    Attributes:
        fingerprint: fingerprint of the epoch's first samples in that process.
        has_more: the stream continues after the epoch's last position.
    """

    fingerprint: int
    has_more: bool


class Stamped(NamedTuple):
    """Data, with the `Stamp` of the process that loaded it.

    Sent between processes as a plain tuple, so it is pinned like any other.
    """

    data: Any
    stamp: Stamp


class StreamReader:
    """Reads one stream forward, in one process; other processes get a copy.

    Args:
        stream: the user's data set.
        length: positions of an epoch.
        loads_here: the training process itself loads, not workers.
        seed: seed of the global generators; None leaves them alone.
    """

    def __init__(
        self, stream: Any, length: int, loads_here: bool, seed: int | None
    ) -> None:
        self.stream, self.name = stream, type(stream).__name__
        self.length = length
        self.seed = seed
        self.group: Group | None = None
        self._loads_here = loads_here
        self._agreed = 0
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

    def join(self, group: Group, seed: int) -> None:
        """Reads the same stream as all ranks of a group: with rank 0's seed.

        Args:
            group: the process group; epochs begin on all of its ranks together.
            seed: seed of the global generators while the stream is read.
        """
        shared = torch.tensor([seed % 2**SEED_BITS], dtype=torch.int64, device="cpu")
        group.broadcast(shared, "sharing the seed of a stream")
        self.seed, self.group = int(shared), group

    def begin_epoch(self, epoch: int) -> None:
        """Opens the stream for an epoch, and compares the ranks' first samples.

        Raises:
            MismatchError: the stream begins differently on another rank.
            ConfigError: it ends within its first samples.
        """
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
        """Refuses samples of a different stream; warns if it exceeds an epoch."""
        if stamp.fingerprint != self._agreed:
            raise MismatchError(
                "a DataLoader worker read different samples from the stream "
                f"{self.name} than at the start of the epoch. Seed the stream's own "
                "generators alike in every process, do not divide it in "
                "worker_init_fn, and note that persistent workers keep their first "
                "copy of the data set"
            )
        if stamp.has_more and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the stream %s yields more than the %d samples of an epoch; the rest "
                "is ignored",
                self.name,
                self.length,
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Context for running the user's stream: own seeds, no worker info."""
        seeded = (
            contextlib.nullcontext() if self.seed is None else untraced_generators()
        )
        with seeded, as_if_alone():
            yield

    def _forget(self) -> None:
        """Resets the position in the stream and releases held samples."""
        self._iterator: Iterator[Any] | None = None
        self._head: deque[Any] = deque()
        self._epoch = -1
        self._next = self._pulled = 0
        self._fingerprint = 0
        self._has_more = False

    def _open(self, epoch: int) -> None:
        """Opens the stream for an epoch, and reads its first samples.

        Uses a copy in a worker, or if the epoch may be opened again: some streams count
        their epochs in ``__iter__``, and must begin equally each time.
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
                f"{self.length} samples of an epoch (samples_per_epoch, or its "
                "len()); give the number that it yields. elche divides a stream "
                "itself: it must yield every sample in every process, undivided by "
                "rank or worker_init_fn"
            ) from None
        self._pulled += 1
        return item

    def _seed(self, position: int) -> None:
        if self.seed is not None:
            seed_generators(position_seed(self.seed, self._epoch, position))

    def _look_beyond(self) -> None:
        """Checks for a sample beyond the end; errors there are ignored."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            with contextlib.suppress(Exception):
                next(iterator)
                self._has_more = True

    def _compare(self, group: Group, epoch: int) -> None:
        seen = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
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


def fingerprint(sample: Any) -> int:
    """A number of 56 bits, equal for equal samples.

    Reads containers, tensors, arrays, texts, numbers and plain objects; of other values
    only the type, of large tensors and texts a part.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update("\n".join(_described(sample, 0)).encode(errors="replace"))
    return int.from_bytes(digest.digest(), "little")


def _described(value: Any, depth: int) -> list[str]:
    """Lines that identify a value."""
    kind = type(value).__qualname__
    if depth > MOST_DEPTH:
        return [kind]
    if value is None or isinstance(value, (bool, int, float, complex)):
        return [f"{kind} {value!r}"]
    if isinstance(value, (str, bytes, bytearray)):
        return [f"{kind} {len(value)} {value[:: _step(len(value))]!r}"]
    if hasattr(value, "reshape") and hasattr(value, "dtype"):
        return [f"{kind} {value.shape} {value.dtype}", *_values(value)]
    if callable(getattr(value, "tobytes", None)):
        return [kind, *_described(value.tobytes(), depth + 1)]
    items: list[Any]
    if isinstance(value, Mapping):
        items = [part for pair in value.items() for part in pair]
    elif isinstance(value, (list, tuple)):
        items = list(value)
    else:
        items = list(getattr(value, "__dict__", {}).values())
    lines = [line for item in items for line in _described(item, depth + 1)]
    return [f"{kind} {len(items)}", *lines]


def _values(array: Any) -> list[str]:
    """Values of a tensor or array, a part of them if there are many."""
    try:
        flat = array.reshape(-1)
        return [repr(flat[:: _step(len(flat))].tolist())]
    except (RuntimeError, TypeError, NotImplementedError):
        return []  # sparse, nested or quantised: its kind and shape must do


def _step(length: int) -> int:
    return max(1, -(-length // MOST_VALUES))
