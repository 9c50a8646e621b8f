"""`elche page` and `elche report`: a run's live page, and its report."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import click

from elche.errors import ConfigError


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--at",
    default="",
    metavar="HOST:PORT",
    help="Address to listen on; default: a free port of 127.0.0.1.",
)
@click.option("--with-parent", is_flag=True, hidden=True)
def page(folder: Path, at: str, with_parent: bool) -> None:
    """Show the run whose events are in FOLDER in a browser, live or afterwards.

    Prints the page's address, and serves it until Ctrl-C.
    """
    try:
        from elche.monitor.page.server import serve_page
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the page needs {error.name}: pip install 'elche[page]'"
        ) from error
    if with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    # Flushed: a launcher reads it from a pipe.
    serve_page(folder, at, partial(print, flush=True))


def _end_with_parent() -> None:
    """Ends this process when its launcher has: the system closes the pipe."""
    os.read(0, 1)
    os._exit(0)


@click.command()
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="File to write: *.html opens without network, *.png is a picture.",
)
def report(folder: Path, output: Path) -> None:
    """Write the report of the run whose events are in RUN_FOLDER; print its words."""
    from elche.monitor.page.report_file import write_report

    click.echo("\n".join(write_report(folder, output)))
    click.echo(f"elche report: wrote {output}, {output.stat().st_size / 1e6:.1f} MB")
