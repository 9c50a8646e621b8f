"""Reports as files: HTML for use without network, by Bokeh; PNG by matplotlib."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any, Final

from elche.errors import ConfigError
from elche.monitor.event_records import merged
from elche.monitor.page.rows import ChartRows, event_columns, row_columns
from elche.monitor.page.words import EVENTS_LISTED, ranks_html
from elche.monitor.report import sentences
from elche.monitor.results import check_writable
from elche.monitor.run_history import RunHistory
from elche.runtime.report.event_file import NAME
from elche.runtime.report.files import replace_file

NEEDS: Final = {".html": ("bokeh", "page"), ".png": ("matplotlib", "demo")}
"""By kind of report: the module that draws it, and the extra that installs it."""


def check_report(output: Path) -> None:
    """Checks that a report can be drawn and written.

    Raises:
        ConfigError: its suffix is unknown, a package is missing, or it is not writable.
    """
    if output.suffix not in NEEDS:
        raise ConfigError(f"expected a report named *.html or *.png, got {output}")
    module, extra = NEEDS[output.suffix]
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{output} needs {module}: pip install 'elche[{extra}]'")
    check_writable(output)


def write_report(folder: Path, output: Path) -> list[str]:
    """Writes the report of the run with this folder; returns the run in words.

    Raises:
        ConfigError: there is no event file, or the report cannot be made.
    """
    check_report(output)
    path, history = folder / NAME, RunHistory()
    try:
        history.feed(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"expected the folder of `elche run --events FOLDER`, got {folder}: "
            f"cannot read {path}: {error.strerror}"
        ) from error
    if not history.runs:
        raise ConfigError(f"{path} has no records yet: the run has not begun")
    if output.suffix == ".png":
        _picture(history).savefig(output)
    else:
        replace_file(output, _html(history))
    return sentences(history)


def _html(history: RunHistory) -> str:
    """Returns the whole page, Bokeh's script included."""
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    from elche.monitor.page.charts import THEME, RunCharts

    layout = RunCharts(ChartRows(history), history.records[-1]["t"]).layout
    head, _, ranks, _ = layout.children
    words = (f"<p>{escape(sentence)}</p>" for sentence in sentences(history))
    head.text = f"<h1>Report of a run</h1>{''.join(words)}"
    ranks.text = ranks_html(
        history, merged(history.windows) if history.windows else None
    )
    meta = '<meta name="viewport" content="width=device-width">'
    template = f"{{% block postamble %}}{meta}{{% endblock %}}"
    title = "elche report"
    return str(file_html(layout, INLINE, title, template=template, theme=THEME))


def _picture(history: RunHistory) -> Any:
    """Draws the first logged value, and throughput."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    figure.suptitle("\n".join(sentences(history)[1:3]), fontsize=9, wrap=True)
    value, speed = figure.subplots(2, 1, sharex=True)
    name = next(iter(history.scalar_names), "nothing was logged")
    rows = ChartRows(history).rows
    columns = defaultdict(list, row_columns(history, rows, 0, [name]))
    value.plot(columns["time"], columns["value_0"], label=name)
    speed.plot(columns["time"], columns["samples_per_s"], label="samples/s")
    speed.plot(columns["time"], columns["device_samples_per_s"], label="of its devices")
    for axes in (value, speed):
        axes.legend()
        for time_s in event_columns(history, EVENTS_LISTED)["time"]:
            axes.axvline(time_s, color="#d1453b", alpha=0.5, linewidth=1)
    speed.set(xlabel="time since the start (s)", ylim=(0, None))
    return figure
