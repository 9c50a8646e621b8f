"""Iteration of a DataLoader subclass that overrides ``__iter__`` or ``_get_iterator``.

The subclass's code runs on a view of the user's loader with the same attributes. A
class between the subclass and torch's yields the batches that elche loads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any, final

from torch.utils.data import DataLoader

from elche.errors import ConfigError

FRAMEWORKS = frozenset({"torch", "torchdata", "accelerate"})  # iterate as torch does
USER_LOADER = "_elche_user_loader"
"""Attribute of a loader of positions: the user's loader behind it."""


def own_loader(loader: DataLoader[Any]) -> DataLoader[Any] | None:
    """The user's loader, if its class has an iteration of its own."""
    loader = vars(loader).get(USER_LOADER, loader)
    mro, names = type(loader).__mro__, ("__iter__", "_get_iterator")
    makers = (next(kind for kind in mro if name in vars(kind)) for name in names)
    return None if all(map(_is_of_framework, makers)) else loader


def _is_of_framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in FRAMEWORKS


@final
class OwnIteration:
    """The user's own iteration: yields one batch for each that it draws, in order.

    Args:
        loader: the user's DataLoader.
        draw: loads the next batch, with its tag; None where there is none.
    """

    def __init__(
        self, loader: DataLoader[Any], draw: Callable[[], tuple[Any, Any] | None]
    ) -> None:
        self._loader, self._draw = loader, weakref.WeakMethod(draw)
        self._view = _view_of(loader, weakref.ref(self))
        self._iterator: Iterator[Any] | None = None
        self._held: list[Any] = []  # the tag of a batch that is drawn and not yielded
        self._epoch, self._thread, self._has_ended, self._fault = -1, 0, False, ""
        self._yielded = 0

    def start(self, epoch: int) -> None:
        """Begins an epoch; in a further part of one the iteration continues."""
        self._held.clear()
        if epoch != self._epoch:
            self._epoch, self._iterator = epoch, None

    def next(self, *, is_over: bool = False) -> tuple[Any, Any] | None:
        """The next batch with its tag; None at the epoch's end.

        Raises:
            ConfigError: the iteration does not yield one batch for each drawn.
        """
        self._thread, self._has_ended = threading.get_ident(), False
        try:
            if self._iterator is None:
                self._iterator, self._yielded = iter(self._view), 0
            data = next(self._iterator)
        except (StopIteration, RuntimeError) as error:  # `next(batches)` in a generator
            if not isinstance(error.__cause__ or error, StopIteration):
                raise
            is_whole = is_over or self._yielded == length_hint(self._loader, -1)
            if self._fault or self._held or not is_whole:
                self._refuse(self._fault or "drops batches, or ends before they do")
            self._iterator = None  # a rank may have more than ``len()`` batches
            return None if is_over else self.next()
        if not self._held:
            self._refuse("yields a batch twice, or one that it has not drawn")
        self._yielded += 1
        return self._held.pop(), data

    def __iter__(self) -> OwnIteration:
        return self

    def __next__(self) -> Any:
        """A batch for the user's code."""
        if threading.get_ident() != self._thread:
            self._fault = "draws its batches in another thread"
            raise StopIteration  # refused in the loop's thread
        if self._held or self._has_ended:
            self._refuse("fetches ahead, merges or drops batches, or begins anew")
        draw: Any = self._draw()
        got = draw and draw()
        if got is None:
            self._has_ended = True
            raise StopIteration
        self._held.append(got[0])
        return got[1]

    def _refuse(self, fault: str) -> None:
        raise ConfigError(
            f"the iteration of {type(self._loader).__name__} {fault}; elche needs one "
            "yielded batch per drawn batch: change that, or give elche.setup a plain "
            "DataLoader (num_workers= loads ahead) and wrap the loader that it returns"
        )


def _view_of(loader: Any, own: weakref.ref[OwnIteration]) -> Any:
    """The loader's attributes under a class whose base yields elche's batches."""
    kind: Any = type(loader)
    base: Any = next(each for each in kind.__mro__ if _is_of_framework(each))
    methods = {"__iter__": lambda self: self._get_iterator()}
    methods["_get_iterator"] = lambda _: own()
    between = type(base.__name__, (base,), methods)
    names: dict[str, Any] = {"__del__": lambda _: None}  # would end his workers
    for name, kept in vars(loader).items():  # as an InfiniteDataLoader does
        if isinstance(kept, Iterator) and _is_of_framework(type(kept)):
            names[name] = property(lambda _: own(), lambda *_: None)
    view: Any = object.__new__(type(kind.__name__, (kind, between), names))
    object.__setattr__(view, "__dict__", vars(loader))
    return view
