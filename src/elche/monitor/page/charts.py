"""Charts of a run, for the live page and for reports: Bokeh figures without a server.

Headings and tables are HTML beside the canvas, so that a browser can search, zoom and
read them aloud.
"""

from __future__ import annotations

from html import escape
from typing import Any, Final, final

from bokeh.core.property.vectorization import field
from bokeh.layouts import column
from bokeh.models import (
    Column,
    ColumnDataSource,
    DataRange1d,
    Div,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
    TimedeltaTickFormatter,
    VSpan,
)
from bokeh.plotting import figure
from bokeh.transform import factor_cmap

from elche.monitor.page.rows import (
    PARTS,
    SPAN_S,
    ChartRows,
    bar_columns,
    event_columns,
    row_columns,
)
from elche.monitor.page.words import EVENTS_LISTED, events_html, head_html, ranks_html

RANKS_SHOWN: Final = 16
SCALARS_SHOWN: Final = 8
COLOURS: Final = ("#2f81f7", "#e3861b", "#2da44e", "#bf4b8a", "#8957e5", "#0e8a8a")
EVENT_COLOUR: Final = "#d1453b"
HEIGHT_PX: Final = 220
PART_COLOURS: Final = ("#e3861b", "#bf4b8a", "#2f81f7", "#8b949e")
THEMES: Final = {"light": "light_minimal", "dark": "dark_minimal"}
"""Bokeh's theme of the charts, for `bokeh.embed` or a document."""
INK: Final = {"light": ("#24292f", "#ffffff"), "dark": ("#e0e0e0", "#15191c")}
"""Colours of text and background by theme."""
RUN_LINES: Final = {"samples_per_s": "run", "device_samples_per_s": "devices together"}
RANK_CHARTS: Final = (
    ("samples_per_s", "Samples per second of each device alone", "0,0"),
    ("share", "Share of the samples", "0%"),
    ("busy", "Busy: data, transfer and compute", "0%"),
    ("data_wait", "Waiting for data", "0%"),
    ("sync_wait", "Waiting for other ranks, and reducing", "0%"),
)
GRID: Final = {
    "display": "grid",
    "gap": "0 24px",
    "grid-template-columns": "repeat(auto-fit, minmax(min(100%, 460px), 1fr))",
}


def style_sheet(theme: str) -> str:
    """Returns the style of headings and tables in a theme."""
    ink, paper = INK[theme]
    return f"""
:host, body {{ color: {ink}; background: {paper}; font: 15px/1.45 sans-serif; }}
.bk-clearfix, progress, table {{ width: 100%; }}
h1 {{ font-size: 1.5em; margin: .3em 0; }}
h2 {{ font-size: 1em; margin: .8em 0 .2em; }}
progress {{ accent-color: {COLOURS[0]}; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1em 1em; }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; }}
th, td {{ text-align: left; padding: .2em .8em .2em 0; vertical-align: top; }}
"""


@final
class RunCharts:
    """All charts and tables of a run, drawn once or kept up to date.

    Args:
        rows: rows of the run's charts.
        now_s: Unix time.
        over: x axis of the charts, ``"time"`` or ``"samples"``.
        theme: a key of `THEMES`, which the document is given, too.

    Attributes:
        layout: root to embed or to serve.
    """

    def __init__(
        self, rows: ChartRows, now_s: float, over: str = "time", theme: str = "light"
    ) -> None:
        self._rows, self._over, self._theme = rows, over, theme
        self._head, self._ranks, self._list = map(self._text, ("head", "ranks", "list"))
        self._charts = column([], sizing_mode="stretch_width", styles=GRID)
        blocks = [self._head, self._charts, self._ranks, self._list]
        self.layout: Column = column(blocks, sizing_mode="stretch_width")
        self.layout.styles = {"background": INK[theme][1]}
        self._source = ColumnDataSource(name="rows")
        self._events = ColumnDataSource(name="events")
        self._bars = ColumnDataSource(name="bars")
        self._shape: object = None
        self._version: object = None
        self.update(now_s)

    def update(self, now_s: float) -> None:
        """Draws what the run has added since the last call."""
        rows, history = self._rows, self._rows.history
        self._head.text = head_html(history, now_s)
        self._ranks.text = ranks_html(history, history.recent())
        self._list.text = events_html(history)
        ranks = min(RANKS_SHOWN, max((*history.ranks, -1)) + 1)
        names = history.scalar_names[:SCALARS_SHOWN]
        if not rows.rows:
            return
        if self._version != (rows.version, ranks, names):
            self._version, self._drawn = (rows.version, ranks, names), len(rows.rows)
            self._source.data = row_columns(history, rows.rows, ranks, names)
        elif new := rows.rows[self._drawn :]:
            self._drawn += len(new)
            self._source.stream(row_columns(history, new, ranks, names))
        self._events.data = event_columns(history, EVENTS_LISTED)
        self._bars.data = bar_columns(history, ranks)
        if self._shape != (ranks, names):
            self._shape = ranks, names
            self._draw(ranks, names)

    def _draw(self, ranks: int, names: list[str]) -> None:
        """Builds the figures for the ranks and scalars that are known now."""
        self._x = DataRange1d(range_padding=0.02)
        scalars = [
            self._lines(name, {f"value_{number}": name}, "0.[0000]")
            for number, name in enumerate(names)
        ]
        labels = {rank: f"rank {rank}" for rank in range(ranks)}
        of_ranks = [
            self._lines(name, {f"{key}_{rank}": labels[rank] for rank in labels}, form)
            for key, name, form in RANK_CHARTS
        ]
        run = self._lines("Samples per second", RUN_LINES, "0,0")
        self._charts.children = [*scalars, run, self._timeline(ranks), *of_ranks]

    def _lines(self, heading: str, lines: dict[str, str], form: str) -> Column:
        """Returns a chart of columns, each with its label."""
        whole, free = Range1d(-0.02, 1.02), DataRange1d()
        if form == "0,0":
            free.start = 0
        scale = "timedelta" if self._over == "time" else "linear"
        y_range = whole if form == "0%" else free
        plot = self._figure(x_range=self._x, y_range=y_range, x_axis_type=scale)
        plot.xaxis.formatter = _x_format(scale)
        plot.xaxis.axis_label = "samples" if scale == "linear" else None
        drawn, key = [], ""
        for number, (name, label) in enumerate(lines.items()):
            colour, is_first = COLOURS[number % len(COLOURS)], number < len(COLOURS)
            line = plot.line(self._over, name, source=self._source, color=colour)
            line.glyph.line_width = 2
            line.glyph.line_dash, line.name = "solid" if is_first else "dashed", label
            drawn.append(line)
            key += f'<b style="color:{colour}">{"■" if is_first else "▨"}</b> {label} '
        plot.yaxis.formatter = NumeralTickFormatter(format=form)
        spans = VSpan(x=field(self._over), line_color=EVENT_COLOUR, line_alpha=0.6)
        marks = plot.add_glyph(self._events, spans)
        tips = [("", "$name"), ("", f"$y{{{form}}}")]
        plot.add_tools(
            HoverTool(renderers=drawn, tooltips=tips),
            HoverTool(renderers=[marks], tooltips=[("event", "@text")]),
        )
        return self._chart(heading, plot, key if len(lines) > 1 else "")

    def _timeline(self, ranks: int) -> Column:
        """Returns the chart of the last minute, a bar per rank."""
        names = FactorRange(factors=[str(rank) for rank in reversed(range(ranks))])
        plot = self._figure(x_range=Range1d(-SPAN_S, 0), y_range=names)
        plot.xaxis.axis_label = "seconds before the newest window"
        fill = factor_cmap("part", PART_COLOURS, PARTS)
        bars = {"y": "rank", "left": "left", "right": "end", "source": self._bars}
        plot.hbar(**bars, height=0.7, line_color=None, fill_color=fill)
        key = zip(PART_COLOURS, PARTS, strict=True)
        words = (f'<b style="color:{c}">■</b> {n.replace("_", " ")}' for c, n in key)
        return self._chart("The last minute of each rank", plot, " ".join(words))

    def _figure(self, **options: Any) -> figure:
        """Returns an empty figure of the page's size and tools."""
        options |= {"tools": "xbox_zoom,reset", "active_drag": None}
        size = {"height": HEIGHT_PX, "min_border_left": 56}
        plot = figure(sizing_mode="stretch_width", **size, **options)
        plot.xaxis.ticker.desired_num_ticks = 3
        plot.toolbar.logo, plot.toolbar.autohide = None, True
        return plot

    def _chart(self, heading: str, plot: figure, key: str) -> Column:
        block = self._text("heading")
        block.text = f"<h2>{escape(heading)}</h2>{key}"
        return column(block, plot, sizing_mode="stretch_width")

    def _text(self, name: str) -> Div:
        sheet = style_sheet(self._theme)
        div = Div(name=name, sizing_mode="stretch_width", stylesheets=[sheet])
        div.disable_math = True
        return div


def _x_format(scale: str) -> Any:
    if scale == "linear":
        return NumeralTickFormatter(format="0.[0]a")
    parts = ("milliseconds", "seconds", "minsec", "minutes", "hourmin")
    return TimedeltaTickFormatter(**dict.fromkeys(parts, "%H:%M:%S"))
