"""Text of the page as HTML: head line, ranks, events and settings. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from elche.monitor.event_records import Record
from elche.monitor.page.rows import event_text, start_s
from elche.monitor.run_history import RunHistory, rank_row
from elche.monitor.run_view import RunView, clock

RANKS_LISTED: Final = 64
EVENTS_LISTED: Final = 200
"""Newest events in the list and on the charts."""
SILENT_S: Final = 15.0
"""Age (s) of the newest record from which the head line gives it."""


def head_html(history: RunHistory, now_s: float) -> str:
    """Returns the run's state, progress, command and host.

    Args:
        history: the run so far.
        now_s: Unix time.
    """
    name, done = _state(history), 0.0
    if history.epochs:
        total = history.epochs[-1]["samples"]
        done = min(1.0, history.epoch_samples / total) if total else 0.0
    figures = RunView(history).head() if history.records else "waiting for its events"
    if history.end is not None:
        figures += f"; exit codes {history.end['exit_codes']} {history.end['reason']}"
    elif history.records and (age_s := now_s - history.records[-1]["t"]) > SILENT_S:
        figures += f"; last record {clock(age_s)} ago"
    run = history.runs[-1] if history.runs else {}
    command = shlex.join(map(str, run.get("command", ())))
    host = f"{run.get('host', '')}, process {run.get('pid', '')}"
    facts = {"command": command, "host": host}
    terms = (f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items() if v and run)
    bar = f'<progress aria-label="done" max="1" value="{done:.4f}"></progress>'
    return (
        f"<h1>{escape(name)}</h1>{bar}<p>{escape(figures)}</p><dl>{''.join(terms)}</dl>"
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
        rows.append(cells)
    heads = ("rank", "device", "samples/s", *(each.replace("_", " ") for each in parts))
    return _table(f"Ranks: {len(history.ranks)}", heads, rows)


def events_html(history: RunHistory) -> str:
    """Returns the newest events, the last one first, and the run's settings."""
    newest = history.events[: -EVENTS_LISTED - 1 : -1]
    rows = [(clock(e["t"] - start_s(history)), event_text(e)) for e in newest]
    listed = _table(f"Events: {len(history.events)}", ("time", "event"), rows)
    settings = ", ".join(f"{k} {v}" for k, v in sorted(history.settings.items()))
    return f"{listed}<h2>Settings</h2><p>{escape(settings)}</p>"


def _state(history: RunHistory) -> str:
    if history.end is not None:
        has_failed = any(history.end["exit_codes"])
        return "The run has failed" if has_failed else "The run has ended"
    if not history.records:
        return "The run has not begun"
    return "The run is training" if history.epochs else "The ranks are starting"


def _table(name: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"<tr><th>{'<th>'.join(heads)}</tr>"]
    lines += [f"<tr><td>{'<td>'.join(map(escape, row))}</tr>" for row in rows]
    table = f"<table>{''.join(lines)}</table>"
    return f'<h2>{name}</h2><div class="wide" tabindex="0">{table}</div>'
