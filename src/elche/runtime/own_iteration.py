"""Iteration of a DataLoader subclass that overrides ``__iter__`` or ``_get_iterator``.

The subclass's code runs on a view of the user's loader: the same attributes, with a
class between the subclass and torch's that yields the batches that elche loads.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, final

from torch.utils.data import DataLoader

from elche.errors import ConfigError
from elche.torch_internals.batches import LoaderIterator

FRAMEWORKS = frozenset({"torch", "torchdata", "accelerate"})
"""Packages whose loaders yield the same batches as torch's."""
USER_LOADER = "_elche_user_loader"
"""Attribute of a loader of positions: the user's loader behind it."""
ENDED: Final = object()


def own_loader(loader: DataLoader[Any]) -> DataLoader[Any] | None:
    """The user's loader, if its class has an iteration of its own."""
    loader = vars(loader).get(USER_LOADER, loader)
    names = "__iter__", "_get_iterator"
    mro = type(loader).__mro__
    makers = (next(kind for kind in mro if name in vars(kind)) for name in names)
    is_own = names[1] in vars(loader) or not all(map(_is_of_framework, makers))
    return loader if is_own else None


def _is_of_framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in FRAMEWORKS


def kept_iterators(loader: DataLoader[Any]) -> list[str]:
    """Attributes in which a loader keeps iterators of its own."""
    kept = [n for n, each in vars(loader).items() if isinstance(each, LoaderIterator)]
    return [name for name in kept if name != "_iterator"]  # of persistent workers


@final
class OwnIteration:
    """The user's own iteration: yields one batch for each that it draws, in order.

    Args:
        loader: the user's.
        draw: loads the batch behind so many that the iteration holds; StopIteration
            where there is none.
        is_alone: all batches are there from the start (one device), so the iteration
            may fetch ahead, also in a thread.

    Attributes:
        inside: batches that it has drawn and not yielded.
    """

    def __init__(
        self, loader: DataLoader[Any], draw: Callable[[int], Any], *, is_alone: bool
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
        if epoch != self._epoch:
            self._epoch, self._iterator, self.inside = epoch, None, 0

    def next(self) -> Any:
        """The next batch; `ENDED` where it is to begin anew, after ``len()`` batches.

        Raises:
            ConfigError: the iteration does not yield one batch for one.
        """
        data = self._advance()
        if data is ENDED and (self.inside or self._yielded != len(self._loader)):
            raise self._refused(f"ends after {self._yielded} batches")
        return data

    def finish(self) -> None:
        """Runs the iteration to its end, after the last batch."""
        if self._advance() is ENDED and self.inside:
            raise self._refused(f"has dropped {self.inside} batches")

    def _advance(self) -> Any:
        self._thread, self._ends = threading.get_ident(), 0
        if self._iterator is None:
            self._iterator, self._yielded = iter(self._view), 0
        data = ENDED
        try:
            data = next(self._iterator)
        except Exception as error:
            is_end = self._ends and isinstance(error.__cause__, StopIteration)
            if not (is_end or self._fault or isinstance(error, StopIteration)):
                raise
            self._iterator = None
        if data is not ENDED and not self.inside:
            self._fault = self._fault or "yields a batch that it has not drawn"
        if self._fault:
            raise self._refused(self._fault)
        if data is not ENDED:
            self.inside, self._yielded = self.inside - 1, self._yielded + 1
        return data

    def __iter__(self) -> OwnIteration:
        return self

    def __next__(self) -> Any:
        """Called by the user's code for a batch to work on."""
        if not self._is_alone and threading.get_ident() != self._thread:
            self._fault = "draws its batches in another thread"
        elif not self._is_alone and self.inside:
            self._fault = "fetches ahead, merges or drops batches"
        draw = self._draw()
        try:
            if draw is None or self._fault:
                raise StopIteration
            data = draw(self.inside)
        except StopIteration as end:
            self._ends += 1
            if self._ends > 3:  # an endless iteration begins again and again
                raise RuntimeError("no batch is left") from end
            raise
        self.inside += 1
        return data

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"the iteration of {type(self._loader).__name__} {what}; elche needs one "
            "batch yielded for each drawn: change that, or give elche.setup a plain "
            "DataLoader (num_workers= loads ahead) and wrap the loader that it returns"
        )


def _view_of(loader: Any, own: weakref.ref[OwnIteration]) -> Any:
    """The loader's attributes under a class whose base yields elche's batches.

    Iterators that it keeps (as ultralytics' InfiniteDataLoader does) are exchanged too.
    """
    base = next(
        kind
        for kind in type(loader).__mro__
        if issubclass(kind, DataLoader) and _is_of_framework(kind)
    )
    methods = {"__iter__": lambda self: self._get_iterator()}
    methods["_get_iterator"] = lambda self: own()
    between = types.new_class(base.__name__, (base,), None, lambda n: n.update(methods))
    names: dict[str, Any] = {"__del__": lambda self: None}  # would end his workers
    for name in ("_iterator", *kept_iterators(loader)):
        names[name] = property(lambda self: self._get_iterator(), lambda *_: None)
    bases = type(loader), between
    kind = types.new_class(
        type(loader).__name__, bases, None, lambda n: n.update(names)
    )
    view: Any = object.__new__(kind)
    object.__setattr__(view, "__dict__", vars(loader))
    return view
