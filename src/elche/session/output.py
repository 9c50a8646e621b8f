"""Output of one rank for all: lines, and a bar."""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from elche.monitor.progress import TaskProgress
from elche.runtime.loader import RunLoader
from elche.session import ranks
from elche.session.process import process


def print(*values: object, **options: Any) -> None:
    """Prints on rank 0 alone, above a bar of `elche.progress`.

    Args:
        values: what to print.
        options: of Python's ``print``.
    """
    if not ranks.is_main_process():
        return
    tqdm = _tqdm() if process.has_bar else None
    if tqdm is None:
        builtins.print(*values, **options)
        return
    to, end = options.pop("file", None), options.pop("end", "\n")
    options.pop("flush", None)
    text = io.StringIO()
    builtins.print(*values, file=text, end="", **options)
    tqdm.write(text.getvalue(), file=to or sys.stdout, end=end)


def progress(loader: Iterable[Any], **tqdm_options: Any) -> Iterator[Any]:
    """The batches of a loader, with one bar for all ranks, on rank 0.

    ``for batch in elche.progress(loader):`` in place of ``tqdm(loader)``. Over the
    loader of `elche.setup` it counts the samples that all ranks have trained on. Over
    anything else (``loader.steps(n)``, an evaluation loader) it counts what rank 0 is
    handed. tqdm draws it where that is installed; else rich does on a terminal, and
    elsewhere a line goes to the log every ten seconds.

    Args:
        loader: what to iterate over, on every rank.
        tqdm_options: of ``tqdm``, such as ``desc``. Without tqdm all but ``desc``,
            ``total`` and ``disable`` mean nothing.
    """
    if not ranks.is_main_process() or tqdm_options.get("disable"):
        return iter(loader)
    return _shown(loader, tqdm_options)


def _shown(loader: Iterable[Any], options: dict[str, Any]) -> Iterator[Any]:
    run = process.run if isinstance(loader, RunLoader) else None
    before = 0.0 if run is None else run.samples_done
    move, close = _open(loader, options)
    process.has_bar = True
    iterator, count = iter(loader), 0
    try:
        for batch in iterator:
            move(count if run is None else run.samples_done - before)
            yield batch
            count += 1
        move(count if run is None else run.samples_done - before)
    finally:
        process.has_bar = False
        close()
        if (end := getattr(iterator, "close", None)) is not None:
            end()  # a break ends the epoch now


def _open(
    loader: Iterable[Any], options: dict[str, Any]
) -> tuple[Callable[[float], None], Callable[[], None]]:
    """Opens a bar; returns what sets its progress, and what closes it."""
    total, unit = None, "it"
    if isinstance(loader, RunLoader):
        total, unit = loader.epoch_samples, "sample"
    else:
        with contextlib.suppress(TypeError):
            total = len(loader)  # type: ignore[arg-type]
    options = {"total": total, "unit": unit, **options}
    if (tqdm := _tqdm()) is not None:
        bar = tqdm(**options)
        return lambda done: bar.update(int(done) - bar.n), bar.close
    task, reporter = str(options.get("desc") or "training"), TaskProgress()
    reporter.start(task, options["total"])

    def close() -> None:
        reporter.finish(task)
        reporter.close()

    return partial(reporter.update, task), close


def _tqdm() -> Any:
    """The class of that name; None where it is not installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm
