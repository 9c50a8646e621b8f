"""`elche report`: the report of a run, from its event file."""

from __future__ import annotations

from pathlib import Path

import click


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
