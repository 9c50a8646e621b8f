"""Iterable data sets on several ranks: one stream, read by position.

A stream cannot be indexed, so every process that loads (each rank, or each of its
DataLoader workers) reads all of it from its own copy, forward, and keeps only the
positions that it was leased; it begins again where one lies before the place it has
come to (a lease that came back). Leases, balanced shares, exactly-once and tails are
then those of any other data set.

What is promised: every position contributes exactly once, *if* the stream yields the
same samples in the same order in every process. Streams that draw from the global
generators of Python, torch or numpy do: those are seeded anew at every position. The
first samples of each epoch are compared between all ranks and all workers, so a stream
that shuffles with a generator of its own, unseeded, or that divides itself among ranks,
is refused by name. Division among workers is undone: while a stream is read,
``torch.utils.data.get_worker_info()`` says that there are none.

It costs what reading the whole stream costs in each process, and some 20 microseconds
per sample for the seeds.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from elche.comm.process_group import Group
from elche.errors import ConfigError, MismatchError
from elche.runtime.fingerprint import fingerprint
from elche.runtime.sample_seeds import (
    position_seed,
    seed_generators,
    untraced_generators,
)

HEAD_SAMPLES = 2
"""So many samples at the beginning of an epoch are compared between processes."""
SEED_BITS = 62

logger = logging.getLogger(__name__)


class Stamp(NamedTuple):
    """What a process that loads says of the stream it reads.

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


class _Reader:
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
        """What another process needs: no iterator, no group."""
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
        """What the user calls it."""
        return type(self.stream).__name__

    def begin_epoch(self, epoch: int) -> None:
        """See :meth:`StreamView.begin_epoch`."""
        with self._reading():
            self._open(epoch)
        self._agreed = self._fingerprint
        if not self._loads_here:
            self._forget()
        if self.group is not None:
            self._compare(self.group, epoch)

    def read(self, epoch: int, positions: Sequence[int]) -> Stamped:
        """See :meth:`StreamView.read`."""
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
        """See :meth:`StreamView.check`."""
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
            stack.enter_context(_as_if_alone())
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
        """Whether anything follows; what goes wrong there is in no epoch."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            with contextlib.suppress(Exception):
                next(iterator)
                self._has_more = True

    def _compare(self, group: Group, epoch: int) -> None:
        seen = torch.zeros(group.world_size, dtype=torch.int64)
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


class StreamView(Dataset[Any]):
    """An iterable data set that is read by epoch and position.

    Other attributes are the data set's own. Made by :func:`stream_loader`.
    """

    def __init__(
        self, stream: Any, length: int, loads_here: bool, seed: int | None
    ) -> None:
        reader = _Reader(stream, length, loads_here, seed)
        object.__setattr__(self, "_elche_reader", reader)

    def join(self, group: Group, seed: int) -> None:
        """Reads the same stream as all ranks of a group: with rank 0's seed.

        Args:
            group: the process group; epochs begin on all of its ranks together.
            seed: of the global generators while the stream is read.
        """
        shared = torch.tensor([seed % 2**SEED_BITS], dtype=torch.int64)
        group.broadcast(shared, "sharing the seed of a stream")
        self._elche_reader.seed = int(shared)
        self._elche_reader.group = group

    def begin_epoch(self, epoch: int) -> None:
        """Opens an epoch in the training process, together with all ranks.

        Raises:
            MismatchError: the stream begins differently on another rank.
            ConfigError: it ends at once.
        """
        self._elche_reader.begin_epoch(epoch)

    def read(self, epoch: int, positions: Sequence[int]) -> Stamped:
        """The items at these positions of an epoch, in whichever process loads.

        Raises:
            ConfigError: the stream ends before.
        """
        stamped: Stamped = self._elche_reader.read(epoch, positions)
        return stamped

    def check(self, stamp: Stamp) -> None:
        """Looks at what came with loaded data, in the training process.

        Raises:
            MismatchError: the process that loaded it read another stream.
        """
        self._elche_reader.check(stamp)

    def __len__(self) -> int:
        length: int = self._elche_reader.length
        return length

    def __getattr__(self, name: str) -> Any:
        if name == "_elche_reader":
            raise AttributeError(name)
        return getattr(self._elche_reader.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._elche_reader.stream, name, value)

    def __getstate__(self) -> Any:
        return self._elche_reader

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "_elche_reader", state)


def by_position(
    loader: DataLoader[Any],
    samples_per_epoch: int | None,
    world_size: int,
    seed: int | None,
) -> DataLoader[Any]:
    """The loader itself, or one that reads its stream by position.

    On one device a stream is left alone, unless its samples are to be counted or drawn
    by a seed.

    Args:
        loader: the user's.
        samples_per_epoch: positions of an epoch of a stream; None for its length.
        world_size: ranks.
        seed: of the run; None for none.

    Raises:
        ConfigError: the length is none, is said of a data set that is no stream, or is
            missing.
    """
    length = _stream_length(loader, samples_per_epoch)
    if length is None and world_size > 1 and _is_stream(loader):
        raise ConfigError(
            f"how long is an epoch of the stream {type(loader.dataset).__name__}? On "
            "several ranks its length must be known: give the dataset __len__, or "
            "elche.setup(..., samples_per_epoch=N)"
        )
    alone = world_size == 1 and samples_per_epoch is None and seed is None
    return loader if length is None or alone else stream_loader(loader, length, seed)


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _stream_length(
    loader: DataLoader[Any], samples_per_epoch: int | None
) -> int | None:
    """Positions of an epoch of a stream; None if nobody knows, or it is no stream."""
    if samples_per_epoch is not None:
        whole = isinstance(samples_per_epoch, int)
        if not whole or isinstance(samples_per_epoch, bool) or samples_per_epoch < 1:
            raise ConfigError(
                "expected samples_per_epoch to be an int >= 1, got "
                f"{samples_per_epoch!r}"
            )
        if not _is_stream(loader):
            raise ConfigError(
                "samples_per_epoch says how long an epoch of an IterableDataset is; "
                f"{type(loader.dataset).__name__} is none, its sampler says that"
            )
        return samples_per_epoch
    if not _is_stream(loader):
        return None
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def stream_loader(
    loader: DataLoader[Any], length: int, seed: int | None = None
) -> DataLoader[Any]:
    """A loader of the positions of a stream; everything else as the user's.

    Args:
        loader: the user's, over an IterableDataset.
        length: positions of an epoch: samples, or whole batches where the loader has
            ``batch_size=None``.
        seed: of the global generators while the stream is read; None leaves them alone.
    """
    return DataLoader(
        StreamView(loader.dataset, length, loader.num_workers == 0, seed),
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        generator=loader.generator,
        **loading_options(loader),
    )


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader loads, as another one is told it."""
    options = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        options["multiprocessing_context"] = loader.multiprocessing_context
    return options


@contextlib.contextmanager
def _as_if_alone() -> Iterator[None]:
    """Hides from a stream that a worker reads it: it shall not divide itself."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
