"""Text of the page as HTML: head line, ranks, events and settings. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from elche.monitor.event_records import Record
from elche.monitor.page.rows import event_text, start_s
from elche.monitor.run_history import RunHistory, rank_row
from elche.monitor.run_view import clock, run_head

RANKS_LISTED: Final = 64
EVENTS_LISTED: Final = 200
"""Newest events in the list and on the charts."""
SILENT_S: Final = 15.0
"""Age (s) of the newest record from which the head line gives it."""


def head_html(history: RunHistory, now_s: float) -> str:
    """Returns the run's state, progress, command and host at a Unix time."""
    if not history.records:
        return "<h1>The run has not begun</h1><p>waiting for its events</p>"
    epoch, run = (history.epochs or [{}])[-1], (history.runs or [{}])[-1]
    done = history.epoch_samples / (epoch.get("samples") or 1)
    name = "The run is training" if history.epochs else "The ranks are starting"
    text = run_head(history)
    if history.end is not None:
        codes, reason = history.end["exit_codes"], history.end["reason"]
        name = "The run has failed" if any(codes) else "The run has ended"
        text += f"; exit codes {codes} {reason}"
    elif (age_s := now_s - history.records[-1]["t"]) > SILENT_S:
        text += f"; last record {clock(age_s)} ago"
    command = shlex.join(map(str, run.get("command", ())))
    host = f"on {run.get('host', '')}, process {run.get('pid', '')}"
    return (
        f'<h1>{name}</h1><progress aria-label="done" max="1" value="{done}"></progress>'
        f"<p>{escape(text)}</p><p>{escape(command)}</p><p>{escape(host)}</p>"
    )


def ranks_html(history: RunHistory, window: Record | None) -> str:
    """Returns the table of ranks, with their figures in a window."""
    parts, rows = ("share", "compute", "data_wait", "transfer", "sync_wait"), []
    for rank, record in sorted(history.ranks.items())[:RANKS_LISTED]:
        cells = [str(rank), record["device"]]
        if window is not None:
            own = rank_row(window, rank)
            cells.append(f"{own['samples_per_s']:,.0f}")
            cells += [f"{own[part]:.0%}" for part in parts]
            cells.append(f"{1e3 * own['reduction_s']:,.1f}")
        rows.append(cells)
    heads = [*("rank", "device", "samples/s"), *parts, "ms per reduction"]
    shown = [head.replace("_", " ") for head in heads]
    return _table(f"Ranks: {len(history.ranks)}", shown, rows)


def events_html(history: RunHistory) -> str:
    """Returns the newest events, the last one first, and the run's settings."""
    newest = history.events[: -EVENTS_LISTED - 1 : -1]
    rows = [(clock(e["t"] - start_s(history)), event_text(e)) for e in newest]
    listed = _table(f"Events: {len(history.events)}", ("time", "event"), rows)
    settings = [(name, str(value)) for name, value in sorted(history.settings.items())]
    return listed + _table("Settings", ("setting", "value"), settings)


def _table(name: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"<tr><th>{'<th>'.join(heads)}</tr>"]
    lines += [f"<tr><td>{'<td>'.join(map(escape, row))}</tr>" for row in rows]
    table = f"<table>{''.join(lines)}</table>"
    return f'<h2>{name}</h2><div class="wide" tabindex="0">{table}</div>'
