"""Iteration of a DataLoader subclass that overrides ``__iter__`` or ``_get_iterator``.

The subclass's code runs on a view of the user's loader: the same attributes, with a
class between the subclass and torch's that yields the batches that elche loads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, final

from torch.utils.data import DataLoader

from elche.errors import ConfigError

FRAMEWORKS = frozenset({"torch", "torchdata", "accelerate"})
"""Packages whose loaders yield the same batches as torch's."""
USER_LOADER = "_elche_user_loader"
"""Attribute of a loader of positions: the user's loader behind it."""
MOST_ENDS = 3
"""StopIterations after which an iteration that begins again and again is ended."""
ENDED: Final = object()


def own_loader(loader: DataLoader[Any]) -> DataLoader[Any] | None:
    """The user's loader, if its class has an iteration of its own."""
    loader = vars(loader).get(USER_LOADER, loader)
    mro, names = type(loader).__mro__, ("__iter__", "_get_iterator")
    makers = (next(kind for kind in mro if name in vars(kind)) for name in names)
    return None if all(map(_is_of_framework, makers)) else loader


def kept_iterators(loader: DataLoader[Any]) -> list[str]:
    """Attributes in which a loader keeps iterators, as an InfiniteDataLoader does."""
    return [
        name
        for name, each in vars(loader).items()
        if isinstance(each, Iterator) and _is_of_framework(type(each))
        if name != "_iterator"  # torch's own, of persistent workers
    ]


def _is_of_framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in FRAMEWORKS


@final
class OwnIteration:
    """The user's own iteration: yields one batch for each that it draws, in order.

    Args:
        loader: the user's.
        draw: loads the next batch; StopIteration where there is none.
        is_alone: all batches are there from the start (one device), so the iteration
            may fetch ahead, also in a thread.

    Attributes:
        inside: batches that it has drawn and not yielded.
    """

    def __init__(
        self, loader: DataLoader[Any], draw: Callable[[], Any], *, is_alone: bool
    ) -> None:
        self._loader = loader
        self._draw = weakref.WeakMethod(draw)
        self._is_alone = is_alone
        self._view = _view_of(loader, weakref.ref(self))
        self._iterator: Iterator[Any] | None = None
        self._epoch = -1
        self._yielded = self._ends = self._thread = self.inside = 0
        self._fault = ""

    def start(self, epoch: int) -> None:
        """Begins an epoch; in a further part of one the iteration continues."""
        self.inside = 0
        if epoch != self._epoch:
            self._epoch, self._iterator = epoch, None

    def next(self, *, is_over: bool = False) -> Any:
        """The next batch; `ENDED` after the last one, or where ``len()`` are yielded.

        Raises:
            ConfigError: the iteration does not yield one batch for one.
        """
        self._thread, self._ends, data = threading.get_ident(), 0, ENDED
        try:
            if self._iterator is None:
                self._iterator, self._yielded = iter(self._view), 0
            data = next(self._iterator)
        except Exception as error:  # `next(batches)` in a generator is a RuntimeError
            is_end = self._ends and isinstance(error.__cause__, StopIteration)
            if not (is_end or self._fault or isinstance(error, StopIteration)):
                raise
            self._iterator = None
        is_early = not is_over and self._yielded != len(self._loader)
        if data is not ENDED and not self.inside:
            self._fault = self._fault or "yields a batch that it has not drawn"
        elif data is ENDED and (is_early or self.inside):
            self._fault = self._fault or f"ends after {self._yielded} batches"
        if self._fault:
            raise ConfigError(
                f"the iteration of {type(self._loader).__name__} {self._fault}; elche "
                "needs one batch yielded for each drawn: change that, or give "
                "elche.setup a plain DataLoader (num_workers= loads ahead) and wrap "
                "the loader that it returns"
            )
        if data is not ENDED:
            self.inside, self._yielded = self.inside - 1, self._yielded + 1
        return data

    def __iter__(self) -> OwnIteration:
        return self

    def __next__(self) -> Any:
        """A batch for the user's code."""
        if not self._is_alone and threading.get_ident() != self._thread:
            self._fault = "draws its batches in another thread"
        elif not self._is_alone and self.inside:
            self._fault = "fetches ahead, merges or drops batches"
        draw = self._draw()
        try:
            if draw is None or self._fault:
                raise StopIteration
            data = draw()
        except StopIteration as end:
            self._ends += 1
            if self._ends > MOST_ENDS:
                raise RuntimeError("no batch is left") from end
            raise
        self.inside += 1
        return data


def _view_of(loader: Any, own: weakref.ref[OwnIteration]) -> Any:
    """The loader's attributes under a class whose base yields elche's batches."""
    kind: Any = type(loader)
    base: Any = next(
        each
        for each in kind.__mro__
        if issubclass(each, DataLoader) and _is_of_framework(each)
    )
    methods = {"__iter__": lambda self: self._get_iterator()}
    methods["_get_iterator"] = lambda self: own()
    between = type(base)(base.__name__, (base,), methods)
    names: dict[str, Any] = {"__del__": lambda self: None}  # would end his workers
    for name in ("_iterator", *kept_iterators(loader)):
        names[name] = property(lambda self: self._get_iterator(), lambda *_: None)
    view = object.__new__(type(kind)(kind.__name__, (kind, between), names))
    object.__setattr__(view, "__dict__", vars(loader))
    return view
