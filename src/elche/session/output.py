"""Output of one rank for all: lines, and a bar."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from elche.monitor.progress import TaskProgress
from elche.runtime.loader import RunLoader
from elche.session import ranks
from elche.session.process import process


def print(*values: object, **options: Any) -> None:
    """Prints on rank 0 alone, above a bar of `elche.progress`.

    Args:
        values: values to print.
        options: options of Python's ``print``.
    """
    if ranks.is_main_process():
        builtins.print(*values, **options)


def progress(
    loader: Iterable[Any],
    *,
    desc: str = "training",
    total: float | None = None,
    disable: bool = False,
) -> Iterator[Any]:
    """The batches of a loader, with one bar for all ranks, on rank 0.

    ``for batch in elche.progress(loader):`` in place of ``tqdm(loader)``. Over the
    loader of `elche.setup` it counts the samples that all ranks have trained on. Over
    anything else (``loader.steps(n)``, an evaluation loader) it counts rank 0's
    batches. On a terminal rich draws it; elsewhere a line goes to the log every ten
    seconds.

    Args:
        loader: iterable of batches, on every rank.
        desc: name of the bar.
        total: final count; None for the loader's samples, or its length.
        disable: no bar.
    """
    if not ranks.is_main_process() or disable:
        return iter(loader)
    return _shown(loader, desc, total)


def _shown(loader: Iterable[Any], desc: str, total: float | None) -> Iterator[Any]:
    run = process.run if isinstance(loader, RunLoader) else None
    before = 0.0 if run is None else run.samples_done
    if total is None and isinstance(loader, RunLoader):
        total = loader.epoch_samples
    elif total is None:
        with contextlib.suppress(TypeError):
            total = len(loader)  # type: ignore[arg-type]
    iterator, count = iter(loader), 0
    with TaskProgress() as bar:
        bar.start(desc, total)
        try:
            for batch in iterator:
                bar.update(desc, count if run is None else run.samples_done - before)
                yield batch
                count += 1
            bar.update(desc, count if run is None else run.samples_done - before)
        finally:
            bar.finish(desc)
            if (end := getattr(iterator, "close", None)) is not None:
                end()  # a break ends the epoch now
