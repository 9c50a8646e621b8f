"""Charts of a run, for the live page and for reports: Bokeh figures without a server.

Headings and tables are HTML beside the canvas, so that a browser can search, zoom and
read them aloud.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, final

from bokeh import models
from bokeh.core.property.vectorization import field
from bokeh.layouts import column
from bokeh.palettes import Category20_20
from bokeh.plotting import figure
from bokeh.transform import factor_cmap

from elche.monitor.event_records import Record
from elche.monitor.page import rows as chart_rows
from elche.monitor.page.rows import PARTS, ChartRows
from elche.monitor.page.words import EVENTS_LISTED, events_html, head_html, ranks_html

RANKS_SHOWN: Final = 16
SCALARS_SHOWN: Final = 8
COLOURS: Final = (*Category20_20[0::2], *Category20_20[1::2])
PART_COLOURS: Final = ("#e3861b", "#bf4b8a", "#2f81f7", "#8b949e")
THEME: Final = "light_minimal"
"""Bokeh's theme of the charts, for `bokeh.embed` or a document."""
AXES: Final = {"time": "00:00:00", "samples": "0.[0]a"}
"""Format by axis; times are in seconds."""
SCALAR: Final = "0.[0000]"
RUN_LINES: Final = {"samples_per_s": "run", "device_samples_per_s": "devices together"}
RANK_CHARTS: Final = (
    ("samples_per_s", "Samples per second of each device alone", "0,0"),
    ("share", "Share of the samples", "0%"),
    ("busy", "Busy: data, transfer and compute", "0%"),
    ("data_wait", "Waiting for data", "0%"),
    ("sync_wait", "Waiting for other ranks, and reducing", "0%"),
    ("reduction_s", "Seconds per reduction, with its wait for others", "0.000"),
)
COLUMNS: Final = "repeat(auto-fit, minmax(min(100%, 460px), 1fr))"
PAGE_STYLE: Final = """
:root { color-scheme: light dark; }
body { background: Canvas; color: CanvasText; padding: 12px 16px; height: auto;
  box-sizing: border-box; }
"""
DARK_STYLE: Final = """
@media (prefers-color-scheme: dark) {
  :host(.bk-Figure), b { filter: invert(1) hue-rotate(180deg); }
}
"""
"""Inverts what has colours of its own, in the system's dark theme."""
TEXT_STYLE: Final = f"""{DARK_STYLE}
:host {{ font: 15px/1.45 sans-serif; }}
.bk-clearfix, progress, table {{ width: 100%; }}
b {{ display: inline-block; }}
h1 {{ font-size: 1.5em; margin: .3em 0; }}
h2 {{ font-size: 1em; margin: .8em 0 .2em; }}
p {{ overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; }}
th, td {{ text-align: left; padding: .2em .8em .2em 0; vertical-align: top; }}
"""


@final
class RunCharts:
    """All charts and tables of a run in a ``layout``, to embed or to serve."""

    def __init__(self, rows: ChartRows, now_s: float) -> None:
        self._head, self._ranks, self._list = map(_text, ("head", "ranks", "list"))
        grid = {"display": "grid", "gap": "0 24px", "grid-template-columns": COLUMNS}
        self._charts = column([], sizing_mode="stretch_width", styles=grid)
        blocks = [self._head, self._charts, self._ranks, self._list]
        self.layout: models.Column = column(blocks, sizing_mode="stretch_width")
        self.layout.stylesheets = [models.GlobalInlineStyleSheet(css=PAGE_STYLE)]
        self._source = models.ColumnDataSource(name="rows")
        self._events = models.ColumnDataSource(name="events")
        self._bars = models.ColumnDataSource(name="bars")
        self._shape: object = None
        self._drawn: list[Record] = []
        self.update(rows, now_s)

    def update(self, rows: ChartRows, now_s: float) -> None:
        """Draws what the run has added since the last call."""
        history, found, drawn = rows.history, rows.rows, self._drawn
        self._head.text = head_html(history, now_s)
        self._ranks.text = ranks_html(history, history.recent())
        self._list.text = events_html(history)
        if not found or found is drawn:
            return
        ranks = min(RANKS_SHOWN, max(history.ranks, default=-1) + 1)
        names = history.scalar_names[:SCALARS_SHOWN]
        shape, before, self._drawn = (ranks, names), self._shape, found
        if shape != before or found[: len(drawn)] != drawn:
            self._source.data = chart_rows.row_columns(history, found, ranks, names)
        elif new := found[len(drawn) :]:
            self._source.stream(chart_rows.row_columns(history, new, ranks, names))
        self._events.data = chart_rows.event_columns(history, EVENTS_LISTED)
        self._bars.data = chart_rows.bar_columns(history, ranks)
        if shape != before:
            self._shape = shape
            self._draw(ranks, names)

    def _draw(self, ranks: int, names: list[str]) -> None:
        """Builds the figures for the ranks and scalars that are known now."""
        self._ranges = {axis: models.DataRange1d(range_padding=0.02) for axis in AXES}
        scalars = [
            self._lines(f"{name} over {axis}", {f"value_{number}": name}, SCALAR, axis)
            for number, name in enumerate(names)
            for axis in AXES
        ]
        of_ranks = [
            self._lines(name, {f"{key}_{r}": f"rank {r}" for r in range(ranks)}, form)
            for key, name, form in RANK_CHARTS
        ]
        run = self._lines("Samples per second", RUN_LINES, "0,0")
        self._charts.children = [*scalars, run, self._timeline(ranks), *of_ranks]

    def _lines(
        self, heading: str, lines: dict[str, str], form: str, axis: str = "time"
    ) -> models.Column:
        """Returns a chart of columns, each with its label."""
        plot = self._figure(axis, x_range=self._ranges[axis])
        if form != SCALAR:
            plot.y_range.start = 0
        plot.yaxis.formatter = models.NumeralTickFormatter(format=form)
        style: dict[str, Any] = {"source": self._source, "line_width": 2}
        drawn = [
            plot.line(axis, name, color=colour, name=label, **style)
            for (name, label), colour in zip(lines.items(), COLOURS, strict=False)
        ]
        tips = [("", "$name"), ("", f"$y{{{form}}}")]
        plot.add_tools(models.HoverTool(renderers=drawn, tooltips=tips))
        return _chart(heading, plot, lines.values() if len(lines) > 1 else (), COLOURS)

    def _timeline(self, ranks: int) -> models.Column:
        """Returns the chart of the last minute, a bar per rank."""
        factors = [str(rank) for rank in reversed(range(ranks))]
        plot = self._figure("time", y_range=models.FactorRange(factors=factors))
        fill = factor_cmap("part", PART_COLOURS, PARTS)
        bars = {"y": "rank", "left": "left", "right": "right", "source": self._bars}
        drawn = plot.hbar(**bars, height=0.7, line_color=None, fill_color=fill)
        plot.x_range.renderers = [drawn]
        names = [part.replace("_", " ") for part in PARTS]
        return _chart("The last minute of each rank", plot, names, PART_COLOURS)

    def _figure(self, axis: str, **ranges: Any) -> figure:
        """Returns a figure of the page's size and tools, with the events as marks."""
        tools = {"tools": "xbox_zoom,reset", "active_drag": None}
        size = {"sizing_mode": "stretch_width", "height": 220, "min_border_left": 56}
        plot = figure(**size, **tools, **ranges, stylesheets=[DARK_STYLE])
        plot.background_fill_color = plot.border_fill_color = None
        # Without a background, Bokeh's outline would also trace the line drawn before.
        plot.outline_line_color = None
        plot.toolbar.logo, plot.toolbar.autohide = None, True
        plot.xaxis.ticker.desired_num_ticks = 3
        plot.xaxis.formatter = models.NumeralTickFormatter(format=AXES[axis])
        spans = models.VSpan(x=field(axis), line_color="#d1453b", line_alpha=0.6)
        marks = plot.add_glyph(self._events, spans)
        plot.add_tools(
            models.HoverTool(renderers=[marks], tooltips=[("event", "@text")])
        )
        return plot


def _chart(
    heading: str, plot: figure, key: Iterable[str], colours: Sequence[str]
) -> models.Column:
    block, labels = _text("heading"), zip(key, colours, strict=False)
    block.text = f"<h2>{escape(heading)}</h2>"
    block.text += " ".join(f'<b style="color:{c}">■</b> {name}' for name, c in labels)
    return column(block, plot, sizing_mode="stretch_width")


def _text(name: str) -> models.Div:
    div = models.Div(name=name, sizing_mode="stretch_width", stylesheets=[TEXT_STYLE])
    div.disable_math = True
    return div
